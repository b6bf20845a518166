"""A weight larger than the memory it is brought into: its product is computed by blocks of its rows.

Each column of ``x @ W.T`` depends on one row of ``W`` alone, so a block of rows is brought, used and let go before the
next one is needed. Each is a part of its own to the cache, which reads the next one while one computes, and calls
in lockstep use each in turn. Whether the bits are those of the whole product hangs on the host's kernels: the plan asks
for blocks only where they were found to be (``offstage.stages.machine.row_products``), or of weights that are
multiplied as they rest, each row by itself. Where gradients are recorded all of the weight is read, as of any tensor
that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from offstage.stages.checkpoints.codecs.ordered_linear import linear_in_order, linear_packed
from offstage.stages.dispatch.streaming.streamed_part import StreamedPart
from offstage.stages.dispatch.streaming.waiting_tensor import WaitingTensor

Use = Callable[[StreamedPart], None]
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
_LINEAR: tuple[Any, ...] = (functional.linear, linear_in_order, linear_packed)
_OPERANDS = ("input", "weight", "bias")


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """The ``parts`` of a weight, in the order of its rows; ``acquire`` brings one, ``release`` lets it go."""

    parts: Sequence[StreamedPart]
    acquire: Use
    release: Use

    def multiply(self, linear: Linear, left: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``left`` (…, columns) times all rows, each with its ``bias`` (rows), by the function ``linear``: of
        shape (…, rows).
        """
        rows = sum(len(part.rows) for part in self.parts)
        product = left.new_empty((*left.shape[:-1], rows))
        for part in self.parts:
            within = slice(part.rows.start, part.rows.stop)
            self.acquire(part)
            try:
                (block,) = part.bound
                product[..., within] = linear(left, block, None if bias is None else bias[within])
                del block  # its memory is free once nothing views it
            finally:
                self.release(part)
        return product


class BlockedWeight(WaitingTensor):
    """The weight of a linear layer that is multiplied by ``use``, blocks of its rows, and waits whole for all else."""

    use: RowBlocks

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LINEAR:
            given = {**dict(zip(_OPERANDS, args, strict=False)), **(kwargs or {})}
            left, weight, bias = given["input"], given["weight"], given.get("bias")
            if isinstance(weight, BlockedWeight) and weight._may_multiply(left, bias):
                others = {name: value for name, value in given.items() if name not in _OPERANDS}
                return weight.use.multiply(partial(func, **others), left, bias)
        return super().__torch_function__(func, types, args, kwargs)

    def _may_multiply(self, left: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Return whether ``left`` is multiplied as it is, and no graph is to keep the blocks."""
        if torch.is_autocast_enabled(left.device.type):
            return False
        learns = torch.is_grad_enabled() and (left.requires_grad or self.requires_grad)
        waits = isinstance(left, WaitingTensor) or isinstance(bias, WaitingTensor)
        return not learns and not waits
