"""Putting each tensor where its source says: into the model, or nowhere, where it waits.

A tensor that lies on disk and is in the checkpoint as the model needs it is left there. All others are read once. What
waits on the host packed is read as it rests on disk, and stays so.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import nn

from offstage.pipeline.errors import StorageError, apart
from offstage.stages.checkpoints.bulk_reader import BulkReader, TensorRead
from offstage.stages.checkpoints.byte_bar import byte_bar
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import PackedTensor, in_memory
from offstage.stages.checkpoints.packed_reads import SMALL_SPAN_BYTES
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.empty_init.skeleton import parent
from offstage.stages.hosts.stand_ins import Borders
from offstage.stages.machine.aligned_memory import (
    TENSOR_ALIGNMENT,
    Bytes,
    HostBlock,
    align_down,
    align_up,
    byte_view,
    private_memory,
    room_for,
    tensor_in,
)
from offstage.stages.machine.devices import Devices
from offstage.stages.shard_load.checkpoint_match import Load
from offstage.stages.shard_load.model_tensors import make_tensors
from offstage.stages.shard_load.sources import DiskWeights, Sources, located
from offstage.stages.units import CPU, DeviceId


@dataclass(frozen=True, slots=True)
class PlacedWeights:
    """A model whose resident weights are in place.

    Tensors that lie on disk, or on the host as they rest there, are meta tensors in ``model`` and entries of
    ``offloaded``, tied names included, which reads them in the skeleton's dtype on the cpu. ``devices`` are those that
    the weights lie on, ``host`` the block of those on the host, if they lie in one; ``read_bytes`` were read from the
    checkpoint in ``load_seconds``. ``base_bytes`` are what the process held on the host before the first weight was
    there, null where nothing tells. ``borders`` are where it meets what other hosts compute, null where it is whole.
    """

    model: nn.Module
    offloaded: DiskWeights
    load_seconds: float
    read_bytes: int
    devices: Devices
    host: HostBlock | None = None
    base_bytes: int | None = None
    borders: Borders | None = None


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
) -> PlacedWeights:
    """Fill the model with its resident weights; what of the ``sources`` is to rest in the offload store is there.

    Tensors bound for the host are read into ``host``, if there is such a block. The memory held is that of the resident
    weights and, where one must be cast or built, that of its sources. With a ``spill_folder``, weights bound for the
    host wait there until the checkpoint's files have been let go: of pickles, since no other is held meanwhile.
    """
    began, devices = time.perf_counter(), devices or Devices()

    def put(names: Iterable[str], tensor: torch.Tensor, home: DeviceId) -> None:
        placed = host.hold(tensor) if host is not None and home == CPU else devices.put(tensor, home)
        bind(load.model, names, placed)

    resident = {name: source for name, source in sources.items() if source.way == "resident"}
    tensors = make_tensors(load, resident, "loading", devices=devices, host=host)
    if spill_folder is not None and not load.checkpoint.tells_places:
        tensors = _spilled(load, resident, tensors, spill_folder)
    for name, tensor in tensors:
        put(load.skeleton.names_of(name), tensor, resident[name].home)
        del tensor  # or it would be held while the next one is made
    for name, source in sources.items():
        if source.waits:
            tensor = torch.empty(source.spec.shape, dtype=torch_dtype(source.spec.dtype), device="meta")
            bind(load.model, load.skeleton.names_of(name), tensor)
        elif source.way == "computed":
            put((name,), load.model.get_buffer(name), source.home)
    packed = _read_packed(load, sources)
    read_bytes = sum(load.source_bytes(step) for step, _ in load.steps_for(resident))
    read_bytes += sum(source.rest_bytes for source in packed.values())
    waiting = (source for source in {**sources, **packed}.values() if source.waits)
    offloaded = {name: source for source in waiting for name in load.outer_names(source.spec.name)}
    seconds = time.perf_counter() - began
    return PlacedWeights(load.model, DiskWeights(offloaded), seconds, read_bytes, devices, host)


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

    A parameter requires gradients if the one in its place did, unless ``tensor`` is one already.
    """
    value: torch.Tensor | None = None
    for name in names:
        module, attribute = model.get_submodule(parent(name)), name.rpartition(".")[2]
        if value is None:
            before, value = module._parameters.get(attribute), tensor
            if before is not None and not isinstance(tensor, nn.Parameter):
                value = nn.Parameter(tensor, requires_grad=before.requires_grad)
        setattr(module, attribute, value)


def _spilled(
    load: Load, sources: Sources, tensors: Iterable[tuple[str, torch.Tensor]], folder: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the ``tensors``, those bound for the host once the checkpoint's files have been let go.

    A ``.bin`` file from before torch 1.6 has to be in memory whole to give any tensor. With the host's share of the
    weights beside it the peak would be their sum; spilled and brought back after, it is the larger of the two. They
    wait in a file of no name in ``folder``, and come back aligned as they were.
    """
    waiting: list[tuple[str, tuple[int, ...], torch.dtype, int]] = []
    with _spill_file(folder) as file:
        for name, tensor in tensors:
            if sources[name].home != CPU:
                yield name, tensor
                del tensor
                continue
            with _spilling(folder):
                file.write(byte_view(tensor))
                file.flush()
            waiting.append((name, tuple(tensor.shape), tensor.dtype, tensor.data_ptr()))
            del tensor
        load.reader.release()
        file.seek(0)
        for name, shape, dtype, address in waiting:
            tensor = room_for(shape, dtype, offset=address).tensor
            with _spilling(folder):
                file.readinto(byte_view(tensor))  # type: ignore[attr-defined]
            yield name, tensor
            del tensor


def _spill_file(folder: Path) -> IO[bytes]:
    with _spilling(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=folder)


@contextmanager
def _spilling(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = f"weights can't wait there: {error.strerror}; free some space, or set offload_folder to another folder"
        raise StorageError(f"{folder}: {reason}") from apart(error)


def _read_packed(load: Load, sources: Sources) -> Sources:
    """Return what waits on the host as it rests on disk, once it is read: each tensor in one piece of memory."""
    wanted = {name: source for name, source in sources.items() if source.way == "packed_on_host"}
    packed = {name: [at for at in source.at if isinstance(at, PackedTensor)] for name, source in wanted.items()}
    placed = {name: _lay_out([part for tensor in tensors for part in tensor.parts]) for name, tensors in packed.items()}
    total = sum(source.rest_bytes for source in wanted.values())
    with byte_bar("loading", total) as bar, BulkReader() as bulk:
        bulk.read([read for reads, _ in placed.values() for read in reads], bar.update)
    as_they_rest = {}
    for name, source in wanted.items():
        reads, memory = placed[name]
        data = (read.target.numpy() for read in reads)
        at = tuple(in_memory(tensor, [next(data) for _ in tensor.parts], memory) for tensor in packed[name])
        as_they_rest[name] = located(load, source, at)
        for tensor in at if load.check_finite else ():
            load.checked(name, read_extent(tensor))
    return as_they_rest


def _lay_out(parts: Sequence[Extent]) -> tuple[list[TensorRead], Bytes]:
    """Return what reads ``parts`` into new memory, and that; large ones lie where storage can write, small ones by."""
    large = {part for part in parts if part.bytes >= SMALL_SPAN_BYTES}
    sizes = {
        part: align_up(part.end) - align_down(part.begin) if part in large else align_up(part.bytes, TENSOR_ALIGNMENT)
        for part in sorted(parts, key=lambda part: part not in large)
    }
    memory = private_memory(max(1, sum(sizes.values())))
    placed: dict[Extent, TensorRead] = {}
    begin = 0
    for part, size in sizes.items():
        skipped = part.begin - align_down(part.begin) if part in large else 0
        target = tensor_in(memory, begin + skipped, torch.uint8, (part.bytes,))
        room = memoryview(memory)[begin : begin + size] if part in large else None
        placed[part] = TensorRead(part.as_bytes, target, room)
        begin += size
    return [placed[part] for part in parts], np.frombuffer(memory, np.uint8)
