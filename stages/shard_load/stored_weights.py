"""Filling the offload store with what a load needs of it: made once, for all runs of a checkpoint and dtype.

That is what can't be served from the checkpoint as it is, and packed copies where those are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import replace

import torch

from offstage.pipeline.errors import StorageError
from offstage.stages.checkpoints.byte_bar import byte_bar
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import AtRest, PackedTensor, rows_of
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.machine.aligned_memory import byte_view
from offstage.stages.machine.devices import Devices
from offstage.stages.shard_load.load import Load
from offstage.stages.shard_load.model_tensors import make_tensors
from offstage.stages.shard_load.offload_store import OffloadStore, StoredTensor
from offstage.stages.shard_load.packed_copies import find_packed, note_plain, put_packed
from offstage.stages.shard_load.packer import WORTH, InFiles, InMemory, Packer, Source, Unpacked, packed_share
from offstage.stages.shard_load.placed_weights import refuse_infinite
from offstage.stages.units import DISK

LARGE_BYTES = 32 * 2**20
"""What is only cast, and as large as that, is cast piece by piece."""
PIECE_BYTES = 4 * 2**20


def fill_store(load: Load, store: OffloadStore, *, check_finite: bool = False, full: bool = False) -> dict[str, AtRest]:
    """Return where the tensors of ``load`` lie in the ``store``, after adding those that are not there, or damaged.

    ``full`` compares every checksum of the store, not a sample.
    """
    with store.locked():
        copies = _fill_packed(load, store, check_finite=check_finite, full=full)
        plain = _fill_plain(load, store, copies, check_finite=check_finite, full=full)
    return {**plain, **copies}


def _fill_plain(
    load: Load, store: OffloadStore, packed: Collection[str], *, check_finite: bool, full: bool
) -> dict[str, Extent]:
    """Return where those tensors lie that must be in the store, and aren't there ``packed``."""
    wanted = {name: tensor for name, tensor in load.stored.items() if name not in packed}
    files = store.find_all(wanted, full=full)
    absent = {name: tensor for name, tensor in wanted.items() if name not in files}
    store.check_space(len(absent), sum(tensor.bytes for tensor in absent.values()))
    large = {name: source for name in absent if (source := _cast_source(load, name)) is not None}
    for name, source in large.items():
        store.put_pieces(name, absent[name].told, _cast_pieces(load, name, source, check_finite=check_finite))
    small = {name: tensor for name, tensor in absent.items() if name not in large}
    for name, tensor in make_tensors(load, small, "offloading", devices=Devices()):
        if check_finite:
            refuse_infinite(load, name, tensor)
        store.put(name, absent[name], byte_view(tensor))
        del tensor  # or it would be held while the next one is made
    store.publish()
    files |= store.find_all(absent, full=full)
    _check_complete(store, wanted, files)
    return {name: Extent(files[name], 0, tensor.dtype, tensor.shape) for name, tensor in wanted.items()}


def _cast_source(load: Load, name: str) -> Extent | None:
    """Return where the tensor ``name`` lies that is large and only cast; null for any other.

    A run's budget may be less than one of its tensors, which then comes by blocks of rows: it mustn't be whole here.
    """
    step, _ = load.match.origins[name]
    source = load.extent_of(step) if step.converter is None else None
    return source if isinstance(source, Extent) and source.bytes >= LARGE_BYTES else None


def _cast_pieces(load: Load, name: str, source: Extent, *, check_finite: bool) -> Iterator[memoryview]:
    """Yield the bytes of the tensor ``name``, read and cast some rows at a time."""
    dtype, count = torch_dtype(load.skeleton.by_name[name].dtype), source.shape[0]
    rows = max(1, PIECE_BYTES * count // source.bytes)
    for begin in range(0, count, rows):
        piece = rows_of(source, begin, min(begin + rows, count))
        assert piece is not None
        cast = read_extent(piece).to(dtype)
        if check_finite:
            refuse_infinite(load, name, cast)
        yield byte_view(cast)


def _fill_packed(load: Load, store: OffloadStore, *, check_finite: bool, full: bool) -> dict[str, PackedTensor]:
    """Return the copies of those tensors that are to rest packed and shrink."""
    known = find_packed(store, load.packable, full=full)
    absent = {name: tensor for name, tensor in load.packable.items() if name not in known}
    if absent:
        _pack(load, store, absent, check_finite=check_finite)
        store.publish()
        known |= find_packed(store, absent, full=full)
        _check_complete(store, absent, known)
    return {name: copy for name, copy in known.items() if copy is not None}


def _pack(load: Load, store: OffloadStore, wanted: dict[str, StoredTensor], *, check_finite: bool) -> None:
    """Put copies of the tensors ``wanted`` into the store: read where they lie, made first where they lie nowhere."""
    in_files = {name: tensor for name, tensor in wanted.items() if load.pieces(name)}
    made = {name: tensor for name, tensor in wanted.items() if name not in in_files}
    on_host = {name for name in wanted if load.homes[name] != DISK}  # they wait there packed, whatever that saves
    shares = {name: _share(load, name, tensor) for name, tensor in in_files.items()}
    for name in (name for name, share in shares.items() if share > WORTH and name not in on_host):
        note_plain(store, name, in_files.pop(name))
    needed = [tensor.bytes * shares.get(name, 1) for name, tensor in {**in_files, **made}.items()]
    store.check_space(len(needed), math.ceil(sum(needed)))
    with Packer() as packer, byte_bar("packing", sum(tensor.bytes for tensor in in_files.values())) as bar:
        for name, tensor in in_files.items():
            with (
                closing(InFiles(load.pieces(name))) as source,  # last: threads that pack read from its files
                closing(packer.pack(unpacked := _unpacked(load, name, tensor, source), bar.update)) as tiles,
            ):
                put_packed(store, name, tensor, tiles, run=unpacked.run)
    passing = replace(load, host=None, homes={**load.homes, **dict.fromkeys(made, DISK)})  # none stays in memory
    with Packer() as packer:
        for name, data in make_tensors(passing, made, "packing", devices=Devices()):
            if check_finite:
                refuse_infinite(load, name, data)
            _pack_made(load, store, name, made[name], data, packer)
            del data  # or it would be held while the next one is made


def _pack_made(
    load: Load, store: OffloadStore, name: str, tensor: StoredTensor, data: torch.Tensor, packer: Packer
) -> None:
    unpacked = _unpacked(load, name, tensor, InMemory(data))
    if load.homes[name] == DISK and packed_share(unpacked) > WORTH:
        note_plain(store, name, tensor)
    else:
        put_packed(store, name, tensor, packer.pack(unpacked), run=unpacked.run)


def _share(load: Load, name: str, tensor: StoredTensor) -> float:
    with closing(InFiles(load.pieces(name))) as source:
        return packed_share(_unpacked(load, name, tensor, source))


def _unpacked(load: Load, name: str, tensor: StoredTensor, source: Source) -> Unpacked:
    """Return what is to be packed; of experts so that each can be read alone."""
    elements = math.prod(tensor.shape)
    run = elements // tensor.shape[0] if name in load.expert_names else elements
    return Unpacked(source, tensor.dtype, elements, run)


def _check_complete(store: OffloadStore, wanted: Collection[str], there: Collection[str]) -> None:
    for name in (name for name in wanted if name not in there):
        raise StorageError(
            f"{store.folder}: {name!r} isn't there as it was written; check the disk, or set offload_folder"
        )
