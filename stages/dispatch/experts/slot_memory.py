"""The memory that experts are kept in: a slot is a row of every tensor of an expert.

The rows of all slots lie side by side, so that a stretch of slots is what a resident model has as its experts: stacked
tensors that the stock kernels take as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from offstage.stages.dispatch.experts.eviction import Expert
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


class SlotRows:
    """Slots of experts of one kind, each a row of every stack of them.

    ``stacks`` are the tensors of all slots, stacked, by attribute, and ``rows`` the same as bytes.
    """

    def __init__(self, stacks: Mapping[str, torch.Tensor], rows: Mapping[str, torch.Tensor], size: int) -> None:
        self._stacks, self._rows, self.size = stacks, rows, size
        self._free = list(range(size - 1, -1, -1))

    def take(self, _expert: Expert) -> int | None:
        """Return the number of a free slot."""
        return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        """Have ``slot`` be free."""
        self._free.append(slot)

    def region(self, slot: int, _expert: Expert, piece: str) -> torch.Tensor:
        """Return the bytes of the tensor ``piece`` in ``slot``."""
        return self._rows[piece][slot]

    def stack(self, piece: str, begin: int, end: int) -> torch.Tensor:
        """Return the tensors ``piece`` of the slots from ``begin`` to ``end``, stacked."""
        return self._stacks[piece][begin:end]


def slot_rows(kind: Kind, bounds: Sequence[tuple[int, int]], link: Link, *, room: int) -> list[SlotRows]:
    """Return slots for experts of ``kind`` in the memory behind ``link``: those of all ``bounds``, side by side.

    Stacks begin where torch's own tensors would, if that takes no more than ``room`` bytes; else one after the other.
    """
    count = bounds[-1][1]
    sizes = [align_up(count * row.bytes, DEVICE_ALIGNMENT) for _, row in kind]
    if sum(sizes) > room:
        kind = tuple(sorted(kind, key=lambda each: -each[1].dtype.itemsize))  # so that each can begin where it does
        sizes = [count * row.bytes for _, row in kind]
    memory = link.memory(max(1, sum(sizes)))
    begins = dict(zip((name for name, _ in kind), accumulate(sizes, initial=0), strict=False))
    regions = {name: memory.lend(begins[name], count * row.bytes)[0] for name, row in kind}
    rows = {name: regions[name].view(count, row.bytes) for name, row in kind}
    stacks = {name: regions[name].view(row.dtype).view(count, *row.shape) for name, row in kind}
    return [SlotRows(_between(stacks, begin, end), _between(rows, begin, end), end - begin) for begin, end in bounds]


def _between(tensors: Mapping[str, torch.Tensor], begin: int, end: int) -> dict[str, torch.Tensor]:
    return {name: tensor[begin:end] for name, tensor in tensors.items()}
