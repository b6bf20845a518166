"""Where the tensors of a part go, on an accelerator or on the host, and in which chunks they are read for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from offstage.stages.checkpoints.device_codec import can_unpack
from offstage.stages.checkpoints.direct_file import cut
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import AtRest, PackedTensor, in_pieces, rest_bytes
from offstage.stages.checkpoints.packed_reads import room_at_rest
from offstage.stages.machine.aligned_memory import align_down, align_up, tensor_in
from offstage.stages.machine.probes import CHUNK_BYTES
from offstage.stages.units import DEVICE_ALIGNMENT

Source = AtRest | torch.Tensor
"""Where a streamed tensor waits: on disk, or on the host."""

RowSource = tuple[AtRest, ...] | torch.Tensor
"""Where an expert's row of a stack waits: in places on disk, one after the other, or on the host."""


@dataclass(frozen=True)
class PlacedTensor:
    """One tensor of a part: where it waits, and where it begins in the part's region."""

    source: Source
    begin: int

    @cached_property
    def data(self) -> torch.Tensor | None:
        """The bytes of one that waits on the host, one after the other; null for one on disk."""
        return self.source.detach().reshape(-1).view(torch.uint8) if isinstance(self.source, torch.Tensor) else None

    @cached_property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return self.source.dtype if isinstance(self.source, torch.Tensor) else torch_dtype(self.source.dtype)

    @cached_property
    def bytes(self) -> int:
        """The tensor's size in use."""
        return self.source.nbytes if isinstance(self.source, torch.Tensor) else self.source.bytes

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(self.source.shape)

    @property
    def rest_bytes(self) -> int:
        """The tensor's size as it rests."""
        return self.source.nbytes if isinstance(self.source, torch.Tensor) else rest_bytes(self.source)

    def view(self, region: torch.Tensor) -> torch.Tensor:
        """Return the tensor, where it lies in ``region``."""
        own = region if self.bytes == region.numel() else region[self.begin : self.begin + self.bytes]
        return own.view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class PartLayout:
    """The tensors of one part in their region of ``size`` bytes.

    Where it ``reads_in_place``, each lies as far from an aligned place as it does in its file.
    """

    pieces: tuple[PlacedTensor, ...]
    size: int
    reads_in_place: bool = False

    @property
    def rest_bytes(self) -> int:
        """The size of the tensors as they rest."""
        return sum(piece.rest_bytes for piece in self.pieces)

    def views(self, region: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors, where they lie in ``region``."""
        if not self.reads_in_place:
            return [piece.view(region) for piece in self.pieces]
        memory = region.numpy()
        return [tensor_in(memory, piece.begin, piece.dtype, piece.source.shape) for piece in self.pieces]


_VECTOR_BYTES = 16
"""What an accelerator's kernels read at once of a tensor that begins at a multiple of it; else others run."""

NOTHING = PartLayout((), 0)
"""What an expert has of a piece that only others of its layer have."""


def lay_out(sources: Sequence[Source], *, link_room: int) -> PartLayout:
    """Return where each of a part's tensors goes, aligned as the accelerator likes it where that fits ``link_room``.

    Else they lie as close as their dtypes allow: nothing is lost between them, and a part fits wherever its bytes do.
    Then too each begins where kernels read it at full width, up to those of a size that is no multiple of that, which
    come last, wide ones first: other kernels would have other last bits.
    """
    pieces = [PlacedTensor(source, 0) for source in sources]
    for alignment in (DEVICE_ALIGNMENT, 1):
        whole = max(alignment, _VECTOR_BYTES)
        order = sorted(range(len(pieces)), key=lambda i: (pieces[i].bytes % whole != 0, -pieces[i].dtype.itemsize))
        begins, size = {}, 0
        for place in order:
            begins[place] = align_up(size, alignment)
            size = begins[place] + pieces[place].bytes
        if size <= link_room:
            break
    return PartLayout(tuple(replace(piece, begin=begins[place]) for place, piece in enumerate(pieces)), size)


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
    return PartLayout(tuple(pieces), size, reads_in_place=True)


def lay_out_row(source: RowSource) -> PartLayout:
    """Return where the pieces of an expert's row go: one after the other, as they are one tensor."""
    pieces, size = [], 0
    for place in (source,) if isinstance(source, torch.Tensor) else source:
        pieces.append(PlacedTensor(place, size))
        size += pieces[-1].bytes
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
