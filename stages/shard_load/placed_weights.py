"""Putting each tensor where the plan says: into the model, into the offload store, or nowhere.

A tensor that lies on disk and is in the checkpoint as the model needs it is left there. All others are read once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.byte_bar import byte_bar
from offstage.stages.checkpoints.dtypes import dtype_name, torch_dtype
from offstage.stages.checkpoints.packed import AtRest, rest_bytes
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.empty_init.skeleton import parent
from offstage.stages.machine.aligned_memory import HostBlock
from offstage.stages.machine.devices import Devices
from offstage.stages.shard_load.disk_weights import DiskWeights
from offstage.stages.shard_load.expert_rows import Rows, locate_rows
from offstage.stages.shard_load.load import Load
from offstage.stages.shard_load.model_tensors import make_tensors
from offstage.stages.shard_load.packed_on_host import Sources, read_at_rest
from offstage.stages.shard_load.spill import Spill
from offstage.stages.units import CPU, DeviceId


@dataclass(frozen=True, slots=True)
class PlacedWeights:
    """A model whose resident weights are in place.

    Tensors that lie on disk, or on the host as they rest there, are meta tensors in ``model`` and entries of
    ``offloaded``, tied names included, which reads them in the skeleton's dtype on the cpu. ``devices`` are those that
    the weights lie on, ``host`` the block of those on the host, if they lie in one; ``read_bytes`` were read from the
    checkpoint in ``load_seconds``. ``base_bytes`` are what the process held on the host before the first weight was
    there, null where nothing tells.
    """

    model: nn.Module
    offloaded: DiskWeights
    load_seconds: float
    read_bytes: int
    devices: Devices
    host: HostBlock | None = None
    base_bytes: int | None = None


def place(
    load: Load,
    stored: Mapping[str, AtRest],
    *,
    devices: Devices | None = None,
    spill_folder: Path | None = None,
    check_finite: bool = False,
) -> PlacedWeights:
    """Fill the model with its resident weights; ``stored`` is what lies in the offload store.

    The memory held is that of the resident weights and, where one must be cast or built, that of its sources. With a
    ``spill_folder``, weights bound for the host wait there until the checkpoint's files have been let go.
    """
    began, devices = time.perf_counter(), devices or Devices()
    names = [spec.name for spec in load.resident]
    with Spill(spill_folder) if spill_folder else nullcontext() as spill:
        for name, tensor in make_tensors(load, names, "loading", devices=devices):
            if check_finite:
                refuse_infinite(load, name, tensor)
            if spill is not None and load.homes[name] == CPU:
                spill.put(name, tensor)
            else:
                _bind_home(load, name, tensor, devices)
            del tensor
        if spill is not None:
            load.reader.release()
            for name, tensor in spill.take_back():
                _bind_home(load, name, tensor, devices)
                del tensor
    _settle_others(load, devices)
    packed = _read_packed(load, stored, check_finite=check_finite)
    steps = {id(step): step for step, _ in (load.match.origins[name] for name in names)}
    read_bytes = sum(load.source_bytes(step) for step in steps.values())
    read_bytes += sum(tensor.rest_bytes for sources in packed.values() for tensor in sources)
    seconds = time.perf_counter() - began
    whole = {name: sources[0] for name, sources in packed.items() if len(sources) == 1}
    waiting = extents(load, stored) | _by_all_names(load, whole)
    offloaded = DiskWeights(waiting, expert_rows(load, stored) | _rows_of(load, packed))
    return PlacedWeights(load.model, offloaded, seconds, read_bytes, devices, load.host)


def joined(pieces: Sequence[PlacedWeights]) -> PlacedWeights:
    """Return as one what was placed piece by piece, from several checkpoints; the last has the whole model."""
    offloaded = [piece.offloaded for piece in pieces]
    return replace(
        pieces[0],
        model=pieces[-1].model,
        offloaded=DiskWeights(
            {name: extent for weights in offloaded for name, extent in weights.extents.items()},
            {name: rows for weights in offloaded for name, rows in weights.rows.items()},
        ),
        load_seconds=sum(piece.load_seconds for piece in pieces),
        read_bytes=sum(piece.read_bytes for piece in pieces),
    )


def extents(load: Load, stored: Mapping[str, AtRest]) -> dict[str, AtRest]:
    """Return where every tensor is that lies on disk in one piece, tied names included; the store goes first."""
    by_name: dict[str, AtRest] = {}
    for spec in load.on_disk:
        source = stored.get(spec.name) or load.served.get(spec.name)
        by_name |= {spec.name: source} if source is not None else {}
    return _by_all_names(load, by_name)


def _by_all_names(load: Load, places: Mapping[str, AtRest]) -> dict[str, AtRest]:
    """Return ``places`` by the names that tensors have where they are used, tied ones included."""
    return {load.outer_name(name): at for leader, at in places.items() for name in load.skeleton.names_of(leader)}


def _read_packed(load: Load, stored: Mapping[str, AtRest], *, check_finite: bool) -> dict[str, Sources]:
    """Read what waits on the host as it rests on disk."""
    wanted = load.packed_on_host(stored)
    with byte_bar("loading", sum(tensor.rest_bytes for sources in wanted.values() for tensor in sources)) as bar:
        found = read_at_rest(wanted, bar.update)
    for name, sources in found.items() if check_finite else ():
        for tensor in sources:
            refuse_infinite(load, name, read_extent(tensor))
    return found


def _rows_of(load: Load, packed: Mapping[str, Sources]) -> dict[str, Rows]:
    """Return where the row of each expert is in what waits ``packed`` on the host."""
    specs = [load.skeleton.by_name[name] for name in packed if name in load.expert_names]
    return {load.outer_name(spec.name): locate_rows(packed[spec.name], spec.shape, spec.dtype) for spec in specs}


def expert_rows(load: Load, stored: Mapping[str, AtRest]) -> dict[str, Rows]:
    """Return where the row of each expert is, of every tensor of a mixture's experts that lies on disk."""
    by_name: dict[str, Rows] = {}
    for spec in load.experts:
        own = [stored[spec.name]] if spec.name in stored else []
        found = locate_rows(own, spec.shape, spec.dtype) or load.rows.get(spec.name)
        by_name |= {load.outer_name(spec.name): found} if found else {}
    return by_name


def bind(model: nn.Module, names: Iterable[str], tensor: torch.Tensor) -> None:
    """Put ``tensor`` into ``model`` under all ``names``: one parameter, or one buffer, that they share.

    A parameter requires gradients if the one in its place did.
    """
    value: torch.Tensor | None = None
    for name in names:
        module, attribute = model.get_submodule(parent(name)), name.rpartition(".")[2]
        if value is None:
            before = module._parameters.get(attribute)
            value = tensor if before is None else nn.Parameter(tensor, requires_grad=before.requires_grad)
        setattr(module, attribute, value)


def refuse_infinite(load: Load, name: str, tensor: torch.Tensor, *, source: str | None = None) -> None:
    """Raise a ``CheckpointError`` if ``tensor`` holds a NaN or an infinity.

    It is what the model calls ``name``, or the part of it that the checkpoint calls ``source``.
    """
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        sources = [source] if source else load.match.origins[name][0].source_names
        where = load.reader.entries[sources[0]].file.path if sources else load.checkpoint.path
        name = source or name
        raise CheckpointError(
            f"{where}: tensor {name!r} holds NaN or infinity as {dtype_name(tensor.dtype)}; "
            "take another dtype, or set check_finite=false"
        )


def refuse_infinite_served(load: Load) -> None:
    """Check the tensors that are served from the checkpoint, and so are never read here otherwise."""
    parts = [(name, source) for name, sources in load.served_by_row.items() for source in sources]
    dtypes = load.skeleton.by_name
    places = [*load.served.values(), *(load.source_in_dtype(source, dtypes[name].dtype) for name, source in parts)]
    with byte_bar("checking", sum(map(rest_bytes, places))) as bar:
        for (name, source), place in zip([*((name, None) for name in load.served), *parts], places, strict=True):
            refuse_infinite(load, name, read_extent(place), source=source)
            bar.update(rest_bytes(place))


def _bind_home(load: Load, name: str, tensor: torch.Tensor, devices: Devices) -> None:
    bind(load.model, load.skeleton.names_of(name), _put(load, tensor, load.homes[name], devices))


def _put(load: Load, tensor: torch.Tensor, home: DeviceId, devices: Devices) -> torch.Tensor:
    return load.host.hold(tensor) if load.host is not None and home == CPU else devices.put(tensor, home)


def _settle_others(load: Load, devices: Devices) -> None:
    """Put the buffers that keep their values on their devices, and take from the model what lies on disk."""
    packed = (load.skeleton.by_name[name] for name in sorted(load.waits_packed))
    for spec in (*load.on_disk, *packed):
        tensor = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
        bind(load.model, load.skeleton.names_of(spec.name), tensor)
    for spec in load.computed_buffers:
        buffer = load.model.get_buffer(spec.name)
        bind(load.model, (spec.name,), _put(load, buffer, load.homes.get(spec.name, CPU), devices))
