"""What each tensor of a model is brought from: one table, decided from headers before a byte of data is read.

All that loads goes by it: what the offload store must have, what is read into the model, and what waits on disk. Each
tensor has one entry, and every step hands all of them on; none is lost because two steps judge it differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from offstage.stages.checkpoints.byte_bar import byte_bar
from offstage.stages.checkpoints.codecs.planes import can_pack
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import AtRest, PackedTensor, in_dtype, rest_bytes
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.empty_init.skeleton import TensorSpec
from offstage.stages.machine.aligned_memory import TENSOR_ALIGNMENT
from offstage.stages.plan.plan import LoadPlan
from offstage.stages.shard_load.checkpoint_match import Load
from offstage.stages.shard_load.expert_rows import Rows, locate_rows, read_rows
from offstage.stages.units import CPU, DISK, DeviceId

Way = Literal["resident", "in_place", "by_expert", "made", "packed_copy", "packed_on_host", "computed"]
"""``resident``: it lies on its device as it is used. ``in_place``: it is read from the checkpoint, which has it in one
piece. ``by_expert``: from tensors of the checkpoint, one after the other, of which single experts are read. ``made``:
from the offload store, where it is made as it is used. ``packed_copy``: from a packed copy there. ``packed_on_host``:
it waits on the host as it rests on disk, in the checkpoint or as such a copy. ``computed``: a buffer that no checkpoint
has, as the model's constructor computed it."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """What one tensor of the model is brought from, and the way; ``home`` is the device that it lies on.

    ``at`` has its pieces at rest, one after the other: what is made, or copied, has none before the offload store has
    it. ``rows`` says where in them the row of each expert is, of a tensor that has a row an expert. While a packed copy
    is still to be found or made, ``otherwise`` is the way of a tensor that doesn't shrink, and ``at`` what of the
    checkpoint is packed; where that is nothing, the tensor is made first.
    """

    spec: TensorSpec
    outer: str
    home: DeviceId
    way: Way
    at: tuple[AtRest, ...] = ()
    rows: Rows = ()
    otherwise: Way | None = None

    @property
    def whole(self) -> AtRest | None:
        """Where it rests in one piece; null where it rests in several, or isn't away."""
        return self.at[0] if len(self.at) == 1 and self.way != "by_expert" else None

    @property
    def waits(self) -> bool:
        """Whether the model has a meta tensor in its place."""
        return self.way not in ("resident", "computed")

    @property
    def wants_store(self) -> bool:
        """Whether the offload store must be looked into, or filled, before it can be brought."""
        return self.otherwise is not None or (self.way == "made" and not self.at)

    @property
    def is_stored(self) -> bool:
        """Whether it rests in the offload store."""
        return bool(self.at) and self.at[0].file.mtime_ns is None

    @property
    def rests_packed(self) -> bool:
        """Whether any of its pieces does."""
        return any(isinstance(at, PackedTensor) for at in self.at)

    @property
    def rest_bytes(self) -> int:
        """The bytes of its pieces at rest."""
        return sum(map(rest_bytes, self.at))

    @property
    def turned_back(self) -> TensorSource:
        """What it is once its packed copy is known not to be worth making."""
        assert self.otherwise is not None, self.spec.name
        stays = self.otherwise in ("in_place", "by_expert")
        at, rows = (self.at, self.rows) if stays else ((), ())
        return replace(self, way=self.otherwise, at=at, rows=rows, otherwise=None)


Sources = Mapping[str, TensorSource]
"""What every tensor of a load is brought from, by its name in the model, tied ones once."""


def find_sources(load: Load, plan: LoadPlan) -> dict[str, TensorSource]:
    """Return what each tensor is brought from, in the order of the files, and then the buffers that no file has."""
    specs, origins = load.skeleton.by_name, load.origins
    sources = {name: _find(load, plan, specs[name]) for name in origins}
    for spec in load.skeleton.tensors:
        if spec.kind == "buffer" and load.skeleton.leader(spec.name) not in origins:
            outer = load.names.get(spec.name, spec.name)
            home = plan.homes.get(outer, CPU)
            sources[spec.name] = TensorSource(spec, outer, CPU if home == DISK else home, "computed")
    return sources


def _find(load: Load, plan: LoadPlan, spec: TensorSpec) -> TensorSource:
    outer = load.names.get(spec.name, spec.name)
    home = plan.homes[outer]
    source = TensorSource(spec, outer, home, "made" if home == DISK else "resident")
    if home != DISK and outer not in plan.packed_on_host:
        return source
    lies = _lies_as_used(load, source, unpacks=plan.unpacks)
    plain = all(isinstance(at, Extent) for at in lies.at)
    served = lies if lies.way == "in_place" or (lies.way == "by_expert" and outer in plan.by_expert) else source
    if home != DISK:  # only what rests packed in all its pieces waits so
        packed = bool(served.at) and all(isinstance(at, PackedTensor) for at in served.at)
        served = replace(served, way="packed_on_host") if packed else source
    if outer in plan.packs and can_pack(spec.dtype, spec.bytes) and (plain or not served.at):
        way: Way = "packed_copy" if home == DISK else "packed_on_host"
        return replace(lies if plain else source, way=way, otherwise=served.way)
    return served


def _lies_as_used(load: Load, source: TensorSource, *, unpacks: bool) -> TensorSource:
    """Return ``source`` with where the checkpoint has it as it is used, in one piece or by expert; or nowhere."""
    step, dtype = load.step_of(source.spec.name), source.spec.dtype
    whole = load.extent_of(step)
    if load.aligned and isinstance(whole, Extent) and whole.begin % TENSOR_ALIGNMENT:
        whole = None

    def as_used(at: AtRest | None) -> AtRest | None:
        return in_dtype(at, dtype) if isinstance(at, Extent) or (unpacks and at is not None) else None

    at = as_used(whole)
    if at is not None:
        return replace(located(load, source, (at,)), way="in_place")
    if source.spec.name not in load.expert_names:
        return source
    places = [at for name in load.pieces_of(step) if (at := as_used(load.source_extent(name))) is not None]
    by_expert = replace(located(load, source, tuple(places)), way="by_expert")
    return by_expert if by_expert.rows else source


def located(load: Load, source: TensorSource, at: tuple[AtRest, ...]) -> TensorSource:
    """Return ``source`` as it rests at these places."""
    spec = source.spec
    rows = locate_rows(at, spec.shape, spec.dtype) if at and spec.name in load.expert_names else ()
    return replace(source, at=at, rows=rows, otherwise=None)


def check_served(load: Load, sources: Sources) -> None:
    """Check what lies on disk in the checkpoint as it is used, and so is never read here otherwise."""
    served = [source for source in sources.values() if source.home == DISK and source.at]
    with byte_bar("checking", sum(source.rest_bytes for source in served)) as bar:
        for source in served:
            named = (None,) if source.whole else load.pieces_of(load.step_of(source.spec.name))
            for part, at in zip(named, source.at, strict=True):
                load.checked(source.spec.name, read_extent(at), source=part)
                bar.update(rest_bytes(at))


class DiskWeights(Mapping[str, torch.Tensor]):
    """Every tensor of a model that isn't in it but at rest, by its name, tied names included.

    ``offloaded[name]`` reads the tensor now, as it is used, on the cpu, in new memory. A file that changed since it was
    recorded is a ``CheckpointError``. ``sources`` has what each is brought from.
    """

    def __init__(self, sources: Sources) -> None:
        self.sources = sources

    def __getitem__(self, name: str) -> torch.Tensor:
        source = self.sources[name]
        return read_rows(source.rows) if source.whole is None else read_extent(source.whole)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)

    def __contains__(self, name: object) -> bool:
        return name in self.sources

    @cached_property
    def extents(self) -> Mapping[str, AtRest]:
        """Where each tensor lies that is in one piece, for a reader that has buffers of its own."""
        places = ((name, source.whole) for name, source in self.sources.items())
        return {name: place for name, place in places if place is not None}

    @cached_property
    def rows(self) -> Mapping[str, Rows]:
        """Where the row of each expert lies, of every tensor that has one row an expert."""
        return {name: source.rows for name, source in self.sources.items() if source.rows}


def describe_index(load: Load, sources: Sources) -> dict[str, object]:
    """Return where each tensor on disk is: its place in a file, or the tensors that it is in the checkpoint."""
    index: dict[str, object] = {}
    for source in (source for source in sources.values() if source.home == DISK):
        kind, at = "store" if source.is_stored else "checkpoint", source.whole
        header = {"dtype": source.spec.dtype, "shape": list(source.spec.shape)}
        if at is None:
            tensors = list(load.pieces_of(load.step_of(source.spec.name)))
            index[source.outer] = {"source": kind, "tensors": tensors, **header}
        else:
            entry = {"source": kind, "file": at.file.name, **header, **_offsets(at)}
            index.update(dict.fromkeys(load.outer_names(source.spec.name), entry))
    return index


def _offsets(source: AtRest) -> dict[str, object]:
    """Return where in its file a tensor lies; of one that rests packed where each of its parts does, and the codec."""
    if isinstance(source, PackedTensor):
        parts = [{"file": part.file.name, "offsets": [part.begin, part.end]} for part in source.parts]
        return {"codec": source.codec.name, "parts": parts}
    return {"offsets": [source.begin, source.end]}


def describe_load(tables: Sequence[tuple[Load, Sources]]) -> dict[str, object]:
    """Return how much lies on each tier, and how much of it is read in place, stored and packed."""
    loaded = [source for _, sources in tables for source in sources.values() if source.way != "computed"]
    tiers: dict[str, dict[str, int]] = {}
    for source in loaded:
        tier = tiers.setdefault(str(source.home), {"tensors": 0, "bytes": 0})
        tier["tensors"] += 1
        tier["bytes"] += source.rest_bytes if source.way == "packed_on_host" else source.spec.bytes
    away = [source for source in loaded if source.way in ("in_place", "by_expert", "made")]
    packed = [source for source in loaded if source.is_stored and source.rests_packed]
    return {
        "format": tables[0][0].checkpoint.format,
        "files": [file.name for load, _ in tables for file in load.checkpoint.files],
        "checkpoint_bytes": sum(load.checkpoint.bytes for load, _ in tables),
        "tiers": tiers,
        "served": _count(source for source in away if not source.is_stored),
        "stored": _count(source for source in away if source.is_stored and not source.rests_packed),
        "packed": {**_count(packed), "rest_bytes": sum(source.rest_bytes for source in packed)},
    }


def _count(sources: Iterable[TensorSource]) -> dict[str, int]:
    sizes = [source.spec.bytes for source in sources]
    return {"tensors": len(sizes), "bytes": sum(sizes)}
