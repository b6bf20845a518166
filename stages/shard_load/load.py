"""One load as data: the model to fill, the checkpoint it comes from, and where each tensor is to go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from offstage.pipeline.cache.fingerprint import fingerprint
from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.checkpoint import Checkpoint, identity
from offstage.stages.checkpoints.codecs import loops
from offstage.stages.checkpoints.codecs.planes import can_pack
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import AtRest, PackedTensor, in_dtype, rest_bytes
from offstage.stages.checkpoints.readers import SourceReader, open_reader, open_stored_reader
from offstage.stages.empty_init.merges import sources_in_order
from offstage.stages.empty_init.names import Step
from offstage.stages.empty_init.skeleton import Skeleton, TensorSpec
from offstage.stages.machine.aligned_memory import TENSOR_ALIGNMENT, HostBlock
from offstage.stages.shard_load.checkpoint_match import CheckpointMatch, match_checkpoint
from offstage.stages.shard_load.expert_rows import Rows, locate_rows
from offstage.stages.shard_load.offload_store import StoredTensor
from offstage.stages.shard_load.packed_on_host import Sources
from offstage.stages.units import CPU, DISK, DeviceId


@dataclass(frozen=True)
class Load:
    """One load: the model to fill, the checkpoint that it comes from, and where each tensor is to go.

    Tensors bound for the host are read into ``host``, if there is such a block. ``names`` are those that tensors have
    where what is loaded is used, if they are others than ``model`` has; ``routed`` has, by these, the tensors of which
    single experts are read from disk; ``packed`` those that wait on the host as they rest on disk; ``packs`` those that
    rest in the offload store, packed, where they shrink. ``serves_packed`` is false where whoever reads what lies on
    disk can't unpack it. Tensors are ``aligned`` wherever they lie in their file where the library that they are
    compared with copies them, as peft does those of an adapter; others are used as they lie, as transformers maps them.
    """

    model: nn.Module
    skeleton: Skeleton
    homes: Mapping[str, DeviceId]
    checkpoint: Checkpoint
    reader: SourceReader
    match: CheckpointMatch
    host: HostBlock | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    routed: Collection[str] = ()
    packed: Collection[str] = ()
    serves_packed: bool = True
    packs: Collection[str] = ()
    aligned: bool = False

    @cached_property
    def on_disk(self) -> tuple[TensorSpec, ...]:
        """The tensors that lie on disk, tied ones once."""
        return tuple(self.skeleton.by_name[name] for name in self.match.origins if self.homes[name] == DISK)

    @cached_property
    def resident(self) -> tuple[TensorSpec, ...]:
        """The tensors of the checkpoint that lie on a device as they are used, tied ones once."""
        names = (name for name in self.match.origins if self.homes[name] != DISK and name not in self.waits_packed)
        return tuple(self.skeleton.by_name[name] for name in names)

    @cached_property
    def waits_packed(self) -> frozenset[str]:
        """The tensors that wait on the host as they rest on disk: in the checkpoint, or in the offload store."""
        return frozenset(name for name in (*self._packed_in_place, *self.packable) if self.homes[name] != DISK)

    def packed_on_host(self, stored: Mapping[str, AtRest]) -> dict[str, Sources]:
        """Return where those lie on disk, some of them among what is ``stored``."""
        own = {name: (at,) for name, at in stored.items() if isinstance(at, PackedTensor)}
        known = {**self._packed_in_place, **own}
        return {name: known[name] for name in sorted(self.waits_packed) if name in known}

    @cached_property
    def _packed_in_place(self) -> Mapping[str, Sources]:
        names = (name for name in self.match.origins if self.outer_name(name) in self.packed)
        found = {name: self._packed_sources(self.skeleton.by_name[name]) for name in names}
        return {name: sources for name, sources in found.items() if sources}

    def _packed_sources(self, spec: TensorSpec) -> Sources:
        """Return what ``spec`` rests in, if all of it is packed: a tensor, or those of which its experts are read."""
        whole = self._in_place(spec)
        if isinstance(whole, PackedTensor):
            return (whole,)
        places = self._places_by_expert(spec) if self.outer_name(spec.name) in self.routed else []
        packed = tuple(place for place in places if isinstance(place, PackedTensor))
        is_whole = len(packed) == len(places) and locate_rows(packed, spec.shape, spec.dtype)
        return packed if is_whole else ()

    @cached_property
    def served(self) -> Mapping[str, AtRest]:
        """Where those tensors lie that can be served whole from the checkpoint: as they are, or unpacked."""
        extents = ((spec.name, self._in_place(spec)) for spec in self.on_disk)
        return {name: extent for name, extent in extents if extent is not None}

    @cached_property
    def served_by_row(self) -> Mapping[str, tuple[str, ...]]:
        """The tensors that are served expert by expert from the checkpoint, which doesn't hold them whole.

        Each is the tensors beside it, by their names in the checkpoint, one after the other.
        """
        named = ((name, self.outer_name(name)) for name in self.rows.keys() - self.served.keys())
        return {name: self._expert_sources[name] for name, outer in sorted(named) if outer in self.routed}

    @cached_property
    def experts(self) -> tuple[TensorSpec, ...]:
        """The tensors on disk that have a row for each expert of a mixture."""
        return tuple(spec for spec in self.on_disk if spec.name in self.expert_names)

    @cached_property
    def expert_names(self) -> frozenset[str]:
        """The names of all tensors that have a row for each expert of a mixture."""
        return frozenset(name for spec in self.skeleton.experts for name in spec.tensors)

    @cached_property
    def rows(self) -> Mapping[str, Rows]:
        """Where the rows of those tensors of experts lie that the checkpoint holds row by row as they are used."""
        found = ((spec.name, self._rows_in_place(spec)) for spec in self.experts)
        return {name: rows for name, rows in found if rows}

    @cached_property
    def stored(self) -> Mapping[str, StoredTensor]:
        """The tensors that must be in the offload store."""
        specs = (spec for spec in self.on_disk if spec.name not in self.served and spec.name not in self.served_by_row)
        return {spec.name: self._stored(spec) for spec in specs}

    @cached_property
    def packable(self) -> Mapping[str, StoredTensor]:
        """The tensors that are to rest packed in the offload store; what the checkpoint has packed stays as it is."""
        specs = (self.skeleton.by_name[name] for name in self.match.origins if self.outer_name(name) in self.packs)
        return {
            spec.name: self._stored(spec)
            for spec in specs
            if self.homes[spec.name] == DISK or self.outer_name(spec.name) in self.packed
            if can_pack(spec.dtype, spec.bytes) and len(self.pieces(spec.name)) == len(self._places(spec.name))
        }

    def pieces(self, name: str) -> tuple[Extent, ...]:
        """Return the extents of the checkpoint that the tensor ``name`` is as it is used, one after the other."""
        return tuple(place for place in self._places(name) if isinstance(place, Extent))

    def _places(self, name: str) -> tuple[AtRest, ...]:
        place = self._in_place(self.skeleton.by_name[name])
        return (place,) if place is not None else tuple(place for row in self.rows.get(name, ()) for place in row)

    def _stored(self, spec: TensorSpec) -> StoredTensor:
        return StoredTensor(spec.dtype, spec.shape, tuple(self.match.origins[spec.name][0].source_names))

    @property
    def store_key(self) -> str:
        """What an offload store of these tensors is known by: which checkpoint it is, in which dtype."""
        return fingerprint({"checkpoint": identity(self.checkpoint), "dtype": self.main_dtype})

    @property
    def computed_buffers(self) -> tuple[TensorSpec, ...]:
        """The buffers that no checkpoint has: the model's constructor has computed them."""
        return tuple(
            spec for spec in self.skeleton.tensors if spec.kind == "buffer" and spec.name not in self.match.origins
        )

    def host_block(self) -> HostBlock:
        """Return a block of memory for all tensors that are to lie on the host."""
        specs = (*self.resident, *self.computed_buffers)
        return HostBlock([spec.bytes for spec in specs if self.homes.get(spec.name, CPU) == CPU])

    @property
    def main_dtype(self) -> str:
        """The dtype of most of the model's bytes: what ``auto`` comes to."""
        bytes_by_dtype: Counter[str] = Counter()
        for spec in self.skeleton.unique:
            bytes_by_dtype[spec.dtype] += spec.bytes
        return bytes_by_dtype.most_common(1)[0][0]

    def outer_name(self, name: str) -> str:
        """Return what the tensor ``name`` is called where what is loaded is used."""
        return self.names.get(name, name)

    def source_bytes(self, step: Step) -> int:
        """Return the bytes of the tensors in the checkpoint that ``step`` reads, as they rest."""
        return sum(rest_bytes(self.reader.entries[name]) for name in step.source_names)

    def extent_of(self, step: Step) -> AtRest | None:
        """Return where the one tensor lies that ``step`` takes as it is; null if it makes one, or in a pickle."""
        names = sources_in_order(step, self.reader.entries) if len(step.sources) == 1 else ()
        extent = self.source_extent(names[0]) if names else None
        return extent if extent is not None and (extent.shape,) == tuple(step.targets.values()) else None

    def source_extent(self, name: str) -> AtRest | None:
        """Return where the tensor that the checkpoint calls ``name`` lies; null if in a pickle."""
        return None if self.checkpoint.format == "bin" else self.reader.entries[name]

    def source_in_dtype(self, name: str, dtype: str) -> AtRest:
        """Return where the tensor that the checkpoint calls ``name`` lies, unpacked to ``dtype`` where it is packed."""
        source = self.reader.entries[name]
        return in_dtype(source, dtype) or source

    def _in_place(self, spec: TensorSpec) -> AtRest | None:
        extent = self.extent_of(self.match.origins[spec.name][0])
        if self.aligned and isinstance(extent, Extent) and extent.begin % TENSOR_ALIGNMENT:
            return None
        return self._served_as(extent, spec.dtype) if extent is not None else None

    def _served_as(self, source: AtRest, dtype: str) -> AtRest | None:
        return in_dtype(source, dtype) if self.serves_packed or isinstance(source, Extent) else None

    @cached_property
    def _expert_sources(self) -> Mapping[str, tuple[str, ...]]:
        origins = self.match.origins
        names = self.expert_names & origins.keys()
        return {name: sources_in_order(origins[name][0], self.reader.entries) for name in names}

    def _rows_in_place(self, spec: TensorSpec) -> Rows:
        return locate_rows(self._places_by_expert(spec), spec.shape, spec.dtype)

    def _places_by_expert(self, spec: TensorSpec) -> list[AtRest]:
        """Return the places that ``spec`` is, one after the other."""
        names = self._expert_sources[spec.name]
        extents = [extent for name in names if (extent := self.source_extent(name)) is not None]
        return [place for extent in extents if (place := self._served_as(extent, spec.dtype)) is not None]


def prepare(
    model: nn.Module,
    skeleton: Skeleton,
    *,
    homes: Mapping[str, DeviceId],
    checkpoint: Checkpoint,
    strict: bool = True,
    partial: bool = False,
) -> Load:
    """Return the load of ``checkpoint`` into ``model``, checked against its ``skeleton`` from headers alone.

    A model that computes with codes and scales itself has them as the files do. ``homes`` says where each of the
    skeleton's tensors goes. ``strict`` and ``partial`` say which of the two may lack tensors of the other; see
    ``match_checkpoint``.
    """
    reader = open_reader(checkpoint)
    if any(isinstance(entry, PackedTensor) for entry in reader.entries.values()):
        loops.build()  # now, before any weight is there: a compiler takes memory too
    scales = checkpoint.entries.keys() - reader.entries.keys()
    if any(spec.name in scales for spec in skeleton.tensors):
        reader = open_stored_reader(checkpoint)
    match = match_checkpoint(
        model, skeleton, checkpoint=checkpoint, entries=reader.entries, strict=strict, partial=partial
    )
    return Load(model, skeleton, homes, checkpoint, reader, match)


def check_twins(load: Load) -> None:
    """Refuse a checkpoint that has different values for two names that are one tensor in the model."""
    for name, other in load.match.twins:
        first, second = load.reader.borrow(name), load.reader.borrow(other)
        if first.shape != second.shape or not torch.equal(first, second):
            raise CheckpointError(
                f"{load.checkpoint.path}: tensors {name!r} and {other!r} are tied in the model and differ in the "
                "checkpoint; set tie_word_embeddings to false in config.json if they are two"
            )
