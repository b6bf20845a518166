"""Where the tensors of a part go, on an accelerator or on the host, and in which chunks they are read for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stages.checkpoints.direct_file import Chunk, cut
from stages.checkpoints.dtypes import torch_dtype
from stages.checkpoints.extents import Extent
from stages.dispatch.transfer.link import DEVICE_ALIGNMENT
from stages.machine.aligned_memory import align_down, align_up
from stages.machine.probes import CHUNK_BYTES

Source = Extent | torch.Tensor
"""Where a streamed tensor waits: on disk, or on the host."""


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """One tensor of a part: where it waits, and where it begins in the part's region."""

    source: Source
    begin: int

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return torch_dtype(self.source.dtype) if isinstance(self.source, Extent) else self.source.dtype

    @property
    def bytes(self) -> int:
        """The tensor's size."""
        return _bytes(self.source)

    def view(self, region: torch.Tensor) -> torch.Tensor:
        """Return the tensor, where it lies in ``region``."""
        return region[self.begin : self.begin + self.bytes].view(self.dtype).view(self.source.shape)


@dataclass(frozen=True, slots=True)
class PartLayout:
    """The tensors of one part in their region of ``size`` bytes."""

    pieces: tuple[PlacedTensor, ...]
    size: int

    @property
    def bytes(self) -> int:
        """The size of the tensors."""
        return sum(piece.bytes for piece in self.pieces)

    def chunks(self) -> list[tuple[Chunk, int]]:
        """Return the reads that bring what waits on disk, and where in the region the tensor's bytes of each begin."""
        on_disk = ((piece.source, piece.begin) for piece in self.pieces if isinstance(piece.source, Extent))
        return [(c, begin + c.begin - extent.begin) for extent, begin in on_disk for c in cut(extent, CHUNK_BYTES)]


def lay_out(sources: Sequence[Source], *, link_room: int) -> PartLayout:
    """Return where each of a part's tensors goes, aligned as the accelerator likes it where that fits ``link_room``.

    Else they lie as close as their dtypes allow: wide ones first, nothing is lost between them, and a part fits
    wherever its bytes do.
    """
    for alignment in (DEVICE_ALIGNMENT, 1):
        order = sorted(range(len(sources)), key=lambda i: (_bytes(sources[i]) % alignment != 0, -_width(sources[i])))
        begins, size = {}, 0
        for place in order:
            begins[place] = align_up(size, alignment)
            size = begins[place] + _bytes(sources[place])
        if size <= link_room:
            break
    return PartLayout(tuple(PlacedTensor(source, begins[place]) for place, source in enumerate(sources)), size)


def lay_out_reads(extents: Sequence[Extent]) -> PartLayout:
    """Return where a part's tensors go on the host: each as far from an aligned place as it is in its file."""
    pieces, size = [], 0
    for extent in extents:
        start = align_down(extent.begin)
        pieces.append(PlacedTensor(extent, size + extent.begin - start))
        size += align_up(extent.end) - start
    return PartLayout(tuple(pieces), size)


def _bytes(source: Source) -> int:
    return source.bytes if isinstance(source, Extent) else source.nbytes


def _width(source: Source) -> int:
    return torch_dtype(source.dtype).itemsize if isinstance(source, Extent) else source.dtype.itemsize
