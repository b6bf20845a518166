"""Where the tensors of a part go, on an accelerator or on the host, and in which chunks they are read for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from offstage.stages.checkpoints.device_codec import can_unpack
from offstage.stages.checkpoints.direct_file import Chunk, cut
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import AtRest, PackedTensor, in_pieces, rest_bytes
from offstage.stages.checkpoints.packed_reads import room_at_rest
from offstage.stages.machine.aligned_memory import align_down, align_up
from offstage.stages.machine.probes import CHUNK_BYTES
from offstage.stages.units import DEVICE_ALIGNMENT

Source = AtRest | torch.Tensor
"""Where a streamed tensor waits: on disk, or on the host."""


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """One tensor of a part: where it waits, and where it begins in the part's region."""

    source: Source
    begin: int

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return self.source.dtype if isinstance(self.source, torch.Tensor) else torch_dtype(self.source.dtype)

    @property
    def bytes(self) -> int:
        """The tensor's size in use."""
        return _bytes(self.source)

    @property
    def rest_bytes(self) -> int:
        """The tensor's size as it rests."""
        return _rest_bytes(self.source)

    def view(self, region: torch.Tensor) -> torch.Tensor:
        """Return the tensor, where it lies in ``region``."""
        return region[self.begin : self.begin + self.bytes].view(self.dtype).view(self.source.shape)


@dataclass(frozen=True, slots=True)
class PlacedPacked(PlacedTensor):
    """One that is unpacked to its place."""

    source: PackedTensor


@dataclass(frozen=True, slots=True)
class PartLayout:
    """The tensors of one part in their region of ``size`` bytes."""

    pieces: tuple[PlacedTensor, ...]
    size: int

    @property
    def rest_bytes(self) -> int:
        """The size of the tensors as they rest."""
        return sum(piece.rest_bytes for piece in self.pieces)

    @property
    def packed(self) -> list[PlacedPacked]:
        """Those of the tensors that rest packed, and aren't empty."""
        return [
            PlacedPacked(piece.source, piece.begin)
            for piece in self.pieces
            if isinstance(piece.source, PackedTensor) and piece.bytes
        ]

    def chunks(self) -> list[tuple[Chunk, int]]:
        """Return the reads that bring what lies on disk unpacked, and where in the region each one's bytes begin."""
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


def lay_out_reads(sources: Sequence[AtRest]) -> PartLayout:
    """Return where a part's tensors go on the host: each as far from an aligned place as it is in its file.

    What is unpacked is laid at an aligned place.
    """
    pieces, size = [], 0
    for source in sources:
        if isinstance(source, PackedTensor):
            pieces.append(PlacedTensor(source, size))
            size += align_up(source.bytes)
            continue
        start = align_down(source.begin)
        pieces.append(PlacedTensor(source, size + source.begin - start))
        size += align_up(source.end) - start
    return PartLayout(tuple(pieces), size)


def read_lengths(sources: Iterable[Source], *, as_at_rest: bool = False) -> list[int]:
    """Return the bytes of each read that brings what lies on disk, and of each piece of what is unpacked.

    What an accelerator can unpack is read ``as_at_rest`` where it does.
    """
    return [length for source in sources for length in _read_lengths(source, as_at_rest=as_at_rest)]


def _read_lengths(source: Source, *, as_at_rest: bool) -> list[int]:
    if isinstance(source, Extent):
        return [chunk.length for chunk in cut(source, CHUNK_BYTES)]
    if isinstance(source, torch.Tensor) or not source.bytes:
        return []
    if as_at_rest and can_unpack(source):
        return [count for block in source.codec.blocks(source) if (count := room_at_rest(block))]
    return [align_up(piece.bytes) for _, piece in in_pieces(source)]


def _bytes(source: Source) -> int:
    return source.nbytes if isinstance(source, torch.Tensor) else source.bytes


def _rest_bytes(source: Source) -> int:
    return source.nbytes if isinstance(source, torch.Tensor) else rest_bytes(source)


def _width(source: Source) -> int:
    return (source.dtype if isinstance(source, torch.Tensor) else torch_dtype(source.dtype)).itemsize
