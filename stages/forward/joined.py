"""The outputs of several calls as one tensor a name, rows in the order in which they were given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from offstage.pipeline.errors import ConfigError
from offstage.stages.calls.arguments import ForwardCall, Tensors
from offstage.stages.calls.options import KEY

MASK = "attention_mask"


class Joined:
    """Collects what is kept of each call."""

    def __init__(self) -> None:
        self._calls: list[tuple[Sequence[int], Tensors]] = []

    def add(self, call: ForwardCall, outputs: Mapping[str, torch.Tensor]) -> None:
        """Take the ``outputs`` of ``call``; and its mask of what counts, where an output begins with that shape."""
        tensors = {name: tensor.cpu() for name, tensor in outputs.items()}
        mask = call.arguments.get(MASK)
        fronts = {tuple(tensor.shape[:2]) for tensor in tensors.values()}
        if mask is not None and MASK in call.made and tuple(mask.shape) in fronts:
            tensors.setdefault(MASK, mask)
        self._calls.append((call.rows, tensors))

    def tensors(self) -> Tensors:
        """Return the outputs of all calls by name, each in memory of its own; they aren't here any more afterwards.

        Where rows of several calls differ in size, the shorter end with zeros. Raises a ``ConfigError`` where an output
        isn't one of rows, so that calls can't be put together.
        """
        if len(self._calls) == 1:
            return _apart(self._calls[0][1])
        return {name: self._join(name) for name in list(self._calls[0][1])}

    def _join(self, name: str) -> torch.Tensor:
        """Return the output ``name`` of all calls; each piece is let go as it is copied, so that none is held twice."""
        shapes = [self._shape(rows, tensors[name], name) for rows, tensors in self._calls]
        sizes = [max(each) for each in zip(*(shape[1:] for shape in shapes), strict=True)]
        whole = torch.zeros([sum(shape[0] for shape in shapes), *sizes], dtype=self._calls[0][1][name].dtype)
        for rows, tensors in self._calls:
            for row, own in zip(rows, tensors.pop(name), strict=True):
                whole[row][tuple(slice(0, size) for size in own.shape)] = own
        return whole

    def _shape(self, rows: Sequence[int], piece: torch.Tensor, name: str) -> torch.Size:
        if not piece.dim() or len(piece) != len(rows) or piece.dim() != self._calls[0][1][name].dim():
            raise ConfigError(
                f"{KEY}.batch_size: the output {name!r} of shape {tuple(piece.shape)} isn't one of {len(rows)} rows, "
                "so that batches can't be put together; leave it null, or name others under forward.outputs"
            )
        return piece.shape


def _apart(tensors: Tensors) -> Tensors:
    """Return ``tensors`` with copies of those that lie in the memory of another one, or in more than they fill."""
    seen: set[int] = set()
    separate: Tensors = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        own = storage.data_ptr() not in seen and storage.nbytes() == tensor.nbytes and tensor.is_contiguous()
        seen.add(storage.data_ptr())
        separate[name] = tensor if own else tensor.contiguous().clone()
    return separate
