"""The outputs of several calls as one tensor a name, rows in the order in which they were given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pipeline.errors import ConfigError
from stages.calls.arguments import ForwardCall, Tensors
from stages.calls.options import KEY

MASK = "attention_mask"


class Joined:
    """Collects what is kept of each call."""

    def __init__(self) -> None:
        self._calls: list[tuple[Sequence[int], Tensors]] = []

    def add(self, call: ForwardCall, kept: Mapping[str, torch.Tensor]) -> None:
        """Take what was ``kept`` of ``call``; and its mask of what counts, where an output begins with that shape."""
        tensors = {name: tensor.cpu() for name, tensor in kept.items()}
        mask = call.arguments.get(MASK)
        fronts = {tuple(tensor.shape[:2]) for tensor in tensors.values()}
        if mask is not None and MASK in call.made and tuple(mask.shape) in fronts:
            tensors.setdefault(MASK, mask)
        self._calls.append((call.rows, tensors))

    def tensors(self) -> Tensors:
        """Return the outputs of all calls by name, each in memory of its own.

        Where rows of several calls differ in size, the shorter end with zeros. Raises a ``ConfigError`` where an output
        isn't one of rows, so that calls can't be put together.
        """
        names = self._calls[0][1]
        found = {name: self._calls[0][1][name] if len(self._calls) == 1 else self._join(name) for name in names}
        return _apart(found)

    def _join(self, name: str) -> torch.Tensor:
        pieces = [(list(rows), tensors[name]) for rows, tensors in self._calls]
        for rows, piece in pieces:
            if not piece.dim() or len(piece) != len(rows) or piece.dim() != pieces[0][1].dim():
                raise ConfigError(
                    f"{KEY}.batch_size: the output {name!r} of shape {tuple(piece.shape)} isn't one of {len(rows)} "
                    "rows, so that batches can't be put together; leave it null, or name others under forward.outputs"
                )
        sizes = [max(sizes) for sizes in zip(*(piece.shape[1:] for _, piece in pieces), strict=True)]
        whole = torch.zeros([sum(len(rows) for rows, _ in pieces), *sizes], dtype=pieces[0][1].dtype)
        for rows, piece in pieces:
            for row, own in zip(rows, piece, strict=True):
                whole[row][tuple(slice(0, size) for size in own.shape)] = own
        return whole


def _apart(tensors: Tensors) -> Tensors:
    """Return ``tensors`` with copies of those that lie in the memory of another one, or in more than they fill."""
    seen: set[int] = set()
    found: Tensors = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        own = storage.data_ptr() not in seen and storage.nbytes() == tensor.nbytes and tensor.is_contiguous()
        seen.add(storage.data_ptr())
        found[name] = tensor if own else tensor.contiguous().clone()
    return found
