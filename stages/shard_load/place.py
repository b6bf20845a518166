"""Putting each tensor where its source says: into the model, or nowhere, where it waits.

A tensor that lies on disk and is in the checkpoint as the model needs it is left there. All others are read once. What
waits on the host packed is read as it rests on disk, and stays so.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.bulk_reader import BulkReader, TensorRead
from offstage.stages.checkpoints.byte_bar import byte_bar
from offstage.stages.checkpoints.dtypes import dtype_name, torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import PackedTensor, in_memory, rest_bytes
from offstage.stages.checkpoints.packed_reads import SMALL_SPAN_BYTES
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.empty_init.skeleton import parent
from offstage.stages.machine.aligned_memory import (
    TENSOR_ALIGNMENT,
    Bytes,
    HostBlock,
    align_down,
    align_up,
    private_memory,
    tensor_in,
)
from offstage.stages.machine.devices import Devices
from offstage.stages.shard_load.model_tensors import make_tensors
from offstage.stages.shard_load.sources import DiskWeights, Load, Sources, disk_weights, located
from offstage.stages.shard_load.spill import Spill
from offstage.stages.units import CPU, DISK, DeviceId


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


def host_block(sources: Sources) -> HostBlock:
    """Return a block of memory for all tensors that are to lie on the host as they are used."""
    placed = (source for source in sources.values() if not source.waits and source.home == CPU)
    return HostBlock([source.spec.bytes for source in placed])


def place(
    load: Load,
    sources: Sources,
    *,
    devices: Devices | None = None,
    host: HostBlock | None = None,
    spill_folder: Path | None = None,
    check_finite: bool = False,
) -> PlacedWeights:
    """Fill the model with its resident weights; what of the ``sources`` is to rest in the offload store is there.

    Tensors bound for the host are read into ``host``, if there is such a block. The memory held is that of the resident
    weights and, where one must be cast or built, that of its sources. With a ``spill_folder``, weights bound for the
    host wait there until the checkpoint's files have been let go.
    """
    began, devices = time.perf_counter(), devices or Devices()
    resident = {name: source for name, source in sources.items() if source.way == "resident"}
    put = partial(_put, devices=devices, host=host)
    with Spill(spill_folder) if spill_folder else nullcontext() as spill:
        for name, tensor in make_tensors(load, resident, "loading", devices=devices, host=host):
            if check_finite:
                refuse_infinite(load, name, tensor)
            if spill is not None and resident[name].home == CPU:
                spill.put(name, tensor)
            else:
                bind(load.model, load.skeleton.names_of(name), put(tensor, resident[name].home))
            del tensor
        if spill is not None:
            load.reader.release()
            for name, tensor in spill.take_back():
                bind(load.model, load.skeleton.names_of(name), put(tensor, resident[name].home))
                del tensor
    _settle_others(load, sources, put)
    packed = _read_packed(load, sources, check_finite=check_finite)
    steps = {id(step): step for step in map(load.step_of, resident.values())}
    read_bytes = sum(map(load.source_bytes, steps.values())) + sum(source.rest_bytes for source in packed.values())
    offloaded, seconds = disk_weights(load, {**sources, **packed}), time.perf_counter() - began
    return PlacedWeights(load.model, offloaded, seconds, read_bytes, devices, host)


def joined(pieces: Sequence[PlacedWeights]) -> PlacedWeights:
    """Return as one what was placed piece by piece, from several checkpoints; the last has the whole model."""
    return replace(
        pieces[0],
        model=pieces[-1].model,
        offloaded=DiskWeights({name: source for piece in pieces for name, source in piece.offloaded.sources.items()}),
        load_seconds=sum(piece.load_seconds for piece in pieces),
        read_bytes=sum(piece.read_bytes for piece in pieces),
    )


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


def _put(tensor: torch.Tensor, home: DeviceId, *, devices: Devices, host: HostBlock | None) -> torch.Tensor:
    return host.hold(tensor) if host is not None and home == CPU else devices.put(tensor, home)


def _settle_others(load: Load, sources: Sources, put: Callable[[torch.Tensor, DeviceId], torch.Tensor]) -> None:
    """Put the buffers that keep their values on their devices, and take from the model what waits."""
    for name, source in sources.items():
        if source.waits:
            tensor = torch.empty(source.spec.shape, dtype=torch_dtype(source.spec.dtype), device="meta")
            bind(load.model, load.skeleton.names_of(name), tensor)
        elif source.way == "computed":
            bind(load.model, (name,), put(load.model.get_buffer(name), source.home))


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


def refuse_infinite_served(load: Load, sources: Sources) -> None:
    """Check what lies on disk in the checkpoint as it is used, and so is never read here otherwise."""
    served = {name: source for name, source in sources.items() if source.home == DISK and source.at}
    with byte_bar("checking", sum(source.rest_bytes for source in served.values())) as bar:
        for name, source in served.items():
            named = (None,) if source.whole else load.pieces_of(load.step_of(source))
            for part, at in zip(named, source.at, strict=True):
                refuse_infinite(load, name, read_extent(at), source=part)
                bar.update(rest_bytes(at))


def _read_packed(load: Load, sources: Sources, *, check_finite: bool) -> Sources:
    """Return what waits on the host as it rests on disk, once it is read: each tensor in one piece of memory."""
    wanted = {name: source for name, source in sources.items() if source.way == "packed_on_host"}
    packed = {name: [at for at in source.at if isinstance(at, PackedTensor)] for name, source in wanted.items()}
    placed = {name: _lay_out([part for tensor in tensors for part in tensor.parts]) for name, tensors in packed.items()}
    total = sum(source.rest_bytes for source in wanted.values())
    with byte_bar("loading", total) as bar, BulkReader() as bulk:
        bulk.read([read for reads, _ in placed.values() for read in reads], bar.update)
    found = {}
    for name, source in wanted.items():
        reads, memory = placed[name]
        data = (read.target.numpy() for read in reads)
        at = tuple(in_memory(tensor, [next(data) for _ in tensor.parts], memory) for tensor in packed[name])
        found[name] = located(load, source, at)
        for tensor in at if check_finite else ():
            refuse_infinite(load, name, read_extent(tensor))
    return found


def _lay_out(parts: Sequence[Extent]) -> tuple[list[TensorRead], Bytes]:
    """Return what reads ``parts`` into new memory, and that; large ones lie where storage can write, small ones by."""
    large = [part for part in parts if part.bytes >= SMALL_SPAN_BYTES]
    small = [part for part in parts if part.bytes < SMALL_SPAN_BYTES]
    sizes = [align_up(part.end) - align_down(part.begin) for part in large]
    sizes += [align_up(part.bytes, TENSOR_ALIGNMENT) for part in small]
    memory = private_memory(max(1, sum(sizes)))
    placed: dict[Extent, TensorRead] = {}
    begin = 0
    for part, size in zip((*large, *small), sizes, strict=True):
        placed[part] = _read(part, memory, begin, size, in_place=part.bytes >= SMALL_SPAN_BYTES)
        begin += size
    return [placed[part] for part in parts], np.frombuffer(memory, np.uint8)


def _read(part: Extent, memory: mmap.mmap, begin: int, size: int, *, in_place: bool) -> TensorRead:
    extent = part.as_bytes
    if not in_place:
        return TensorRead(extent, tensor_in(memory, begin, torch.uint8, extent.shape))
    skipped = part.begin - align_down(part.begin)
    target = tensor_in(memory, begin + skipped, torch.uint8, extent.shape)
    return TensorRead(extent, target, memoryview(memory)[begin : begin + size])
