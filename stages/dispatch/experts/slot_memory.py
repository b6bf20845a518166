"""The memory that experts are kept in: a slot is a row of every tensor of an expert.

The rows of all slots lie side by side, so that a stretch of slots is what a resident model has as its experts: stacked
tensors that the stock kernels take as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from offstage.stages.dispatch.transfer.link import Link
from offstage.stages.machine.aligned_memory import align_up
from offstage.stages.units import DEVICE_ALIGNMENT


@dataclass(frozen=True, slots=True)
class RowShape:
    """One tensor of one expert: its ``shape`` and ``dtype``."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


Kind = tuple[tuple[str, RowShape], ...]
"""What experts have in common that can lie in the same slots: the attributes of their module, each with its row."""


def kind_bytes(kind: Kind) -> int:
    """Return the bytes of one expert."""
    return sum(row.bytes for _, row in kind)


class SlotMemory:
    """``count`` slots for experts of ``kind``, in the memory behind ``link``.

    Stacks begin where torch's own tensors would, if that takes no more than ``room`` bytes; else one after the other.
    """

    def __init__(self, kind: Kind, count: int, link: Link, *, room: int) -> None:
        self.count = count
        sizes = [align_up(count * row.bytes, DEVICE_ALIGNMENT) for _, row in kind]
        if sum(sizes) > room:
            kind = tuple(sorted(kind, key=lambda each: -each[1].dtype.itemsize))  # so that each can begin where it does
            sizes = [count * row.bytes for _, row in kind]
        memory = link.memory(max(1, sum(sizes)))
        self._bytes: dict[str, torch.Tensor] = {}
        self._stacks: dict[str, torch.Tensor] = {}
        begin = 0
        for (attribute, row), size in zip(kind, sizes, strict=True):
            region, _ = memory.lend(begin, count * row.bytes)
            self._bytes[attribute] = region.view(count, row.bytes)
            self._stacks[attribute] = region.view(row.dtype).view(count, *row.shape)
            begin += size

    def row(self, attribute: str, slot: int) -> torch.Tensor:
        """Return the bytes of the tensor ``attribute`` in ``slot``."""
        return self._bytes[attribute][slot]

    def stack(self, begin: int, end: int) -> Mapping[str, torch.Tensor]:
        """Return the tensors of the slots from ``begin`` to ``end``, stacked, by attribute."""
        return {attribute: tensor[begin:end] for attribute, tensor in self._stacks.items()}
