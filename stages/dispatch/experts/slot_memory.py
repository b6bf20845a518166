"""The memory that experts are kept in: a slot is a row of every tensor of an expert, or a region for one of a list.

Rows of all slots lie side by side, so that a stretch of slots is what a resident model has as its experts: stacked
tensors that the stock kernels take as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from offstage.stages.dispatch.experts.eviction import Expert
from offstage.stages.dispatch.transfer.arena import Arena, HostMemory, Memory
from offstage.stages.dispatch.transfer.link import Link
from offstage.stages.dispatch.transfer.part_layout import PartLayout, RowSource, lay_out_row
from offstage.stages.machine.aligned_memory import TENSOR_ALIGNMENT, align_up, private_bytes
from offstage.stages.units import DEVICE_ALIGNMENT

Rows = Mapping[str, Sequence[RowSource | PartLayout]]
"""Where the pieces of a layer's experts wait, by the names of the pieces, in the order of the experts."""


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The experts of one module: its ``number`` in the order of execution, and where they wait."""

    number: int
    module: str
    rows: Rows

    @property
    def count(self) -> int:
        """How many experts there are."""
        return len(next(iter(self.rows.values())))

    def layout(self, expert: int, piece: str) -> PartLayout:
        """Return where what there is of a ``piece`` lies in its place in a slot."""
        row = self.rows[piece][expert]
        return row if isinstance(row, PartLayout) else lay_out_row(row)


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


_ByPhase = Mapping[tuple[str, int], torch.Tensor]
"""Tensors by the attribute and the phase of a stack."""

Phases = Mapping[tuple[int, str], int]
"""How far beyond a multiple of ``TENSOR_ALIGNMENT`` a stack of a layer begins, by the layer's number and its attribute.

Kernels are chosen by that, and their last bits differ: a slot is to lie as its row does in a stack that is there.
"""


class SlotRows:
    """Slots of experts of one kind, each a row of every stack of them.

    ``stacks`` are the tensors of all slots, stacked, by attribute and phase, and ``rows`` the same as bytes.
    """

    def __init__(self, stacks: _ByPhase, rows: _ByPhase, size: int, phases: Phases) -> None:
        self._stacks, self._rows, self.size, self._phases = stacks, rows, size, phases
        self._free = list(range(size - 1, -1, -1))

    def take(self, _expert: Expert) -> int | None:
        """Return the number of a free slot."""
        return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        """Have ``slot`` be free."""
        self._free.append(slot)

    def region(self, slot: int, expert: Expert, piece: str) -> torch.Tensor:
        """Return the bytes of the tensor ``piece`` in ``slot``."""
        return self._rows[piece, self._phases.get((expert[0], piece), 0)][slot]

    def stack(self, layer: int, piece: str, begin: int, end: int) -> torch.Tensor:
        """Return the tensors ``piece`` of the slots from ``begin`` to ``end``, stacked, as they lie for ``layer``."""
        return self._stacks[piece, self._phases.get((layer, piece), 0)][begin:end]


class SlotRegions:
    """``room`` bytes behind ``link`` for experts of ``layers``, each in a region of its own for all of its pieces.

    A region is free again when nothing views it any more: a traceback may hold what was let go.
    """

    def __init__(self, layers: Sequence[ExpertLayer], link: Link, room: int) -> None:
        self._link, self._room = link, room
        self._layers = {layer.number: layer for layer in layers}
        self.renew()
        largest = max(sum(self._sizes(layer, expert)) for layer in layers for expert in range(layer.count))
        self.size = max(1, room // max(1, largest))

    def renew(self) -> None:
        """Take other memory: in a process that was forked nobody fills what was lent."""
        memory = _memory(self._link, self._room)
        self._arena: Arena[torch.Tensor] | None = Arena(memory)
        self._alignment = memory.alignment

    def close(self) -> None:
        """Let go of the memory."""
        self._arena = None

    def take(self, expert: Expert) -> torch.Tensor | None:
        """Return a region for all of ``expert``."""
        assert self._arena is not None
        return self._arena.take(sum(self._sizes(self._layers[expert[0]], expert[1])))

    def give(self, slot: torch.Tensor) -> None:
        """Nothing: it is free once it is gone."""

    def region(self, slot: torch.Tensor, expert: Expert, piece: str) -> torch.Tensor:
        """Return the part of the region that a ``piece`` has."""
        layer = self._layers[expert[0]]
        place, sizes = [*layer.rows].index(piece), self._sizes(layer, expert[1])
        begin = sum(sizes[:place])
        return slot[begin : begin + sizes[place]]

    def _sizes(self, layer: ExpertLayer, expert: int) -> list[int]:
        return [align_up(layer.layout(expert, piece).size, self._alignment) for piece in layer.rows]


def slot_rows(
    kind: Kind, bounds: Sequence[tuple[int, int]], link: Link, *, room: int, phases: Phases | None = None
) -> list[SlotRows]:
    """Return slots for experts of ``kind`` in the memory behind ``link``: those of all ``bounds``, side by side.

    Stacks begin where torch's own tensors would, if that takes no more than ``room`` bytes; else one after the other.
    They lie as the ``phases`` of their layers are: where these differ, each row has room for any of them.
    """
    phases, count = phases or {}, bounds[-1][1]
    sizes = [align_up(count * row.bytes, DEVICE_ALIGNMENT) for _, row in kind]
    if sum(sizes) > room:
        kind = tuple(sorted(kind, key=lambda each: -each[1].dtype.itemsize))  # so that each can begin where it does
        sizes = [count * row.bytes for _, row in kind]
    phases_of = {name: {phase for (_, piece), phase in phases.items() if piece == name} or {0} for name, _ in kind}
    strides = {name: row.bytes + TENSOR_ALIGNMENT * (len(phases_of[name]) > 1) for name, row in kind}
    sizes = [
        size + count * (strides[name] - row.bytes) + TENSOR_ALIGNMENT * (max(phases_of[name]) > 0)
        for (name, row), size in zip(kind, sizes, strict=True)
    ]
    memory = _memory(link, sum(sizes))
    rows: dict[tuple[str, int], torch.Tensor] = {}
    stacks: dict[tuple[str, int], torch.Tensor] = {}
    for (name, row), begin in zip(kind, accumulate(sizes, initial=0), strict=False):
        stride = strides[name]
        region, _ = memory.lend(begin, count * stride + max(phases_of[name]))
        for phase in phases_of[name]:
            own = region[phase : phase + count * stride].view(count, stride)[:, : row.bytes]
            rows[name, phase], stacks[name, phase] = own, own.view(row.dtype).view(count, *row.shape)
    return [
        SlotRows(_between(stacks, begin, end), _between(rows, begin, end), end - begin, phases) for begin, end in bounds
    ]


def _memory(link: Link, size: int) -> Memory[torch.Tensor]:
    """Return ``size`` bytes of the memory behind ``link``; on the host not in huge pages.

    The first touch of one may take milliseconds there. The token waits for that which fills a slot, and the rest of the
    page may not be used for long.
    """
    size = max(1, size)
    return HostMemory(align_up(size), private_bytes) if link.in_place else link.memory(size)


def _between(tensors: _ByPhase, begin: int, end: int) -> dict[tuple[str, int], torch.Tensor]:
    return {key: tensor[begin:end] for key, tensor in tensors.items()}
