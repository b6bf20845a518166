"""A tensor that autograd keeps by way of hooks and that stays where it is.

Of one that no hook saw torch itself checks that nothing was written to it since it was saved; of these nobody does, so
it is checked here, with torch's own kind of error.
"""

from __future__ import annotations

import torch


class ReferencedTensor:
    """What autograd holds in place of a tensor that is none of ours to move: itself, cut off from the graph."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    def unpack(self) -> torch.Tensor:
        """Return the tensor."""
        if self._tensor._version != self._version:
            raise changed(self._version, self._tensor._version)
        return self._tensor


def changed(saved: int, version: int) -> RuntimeError:
    """Return the error of a tensor that was written to after it was saved, as autograd's own checks raise it."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: it is at"
        f" version {version}, and was saved at version {saved}; write to a clone, or after the backward pass"
    )
