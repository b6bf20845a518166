"""Filling the offload store with what a load needs of it: made once, for all runs of a checkpoint and dtype.

That is what can't be served from the checkpoint as it is, and packed copies where those are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import TypeVar

from offstage.pipeline.errors import StorageError
from offstage.stages.checkpoints.byte_bar import byte_bar
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import rows_of
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.machine.aligned_memory import byte_view
from offstage.stages.machine.devices import Devices
from offstage.stages.shard_load.model_tensors import make_tensors
from offstage.stages.shard_load.offload_store import OffloadStore, StoredTensor
from offstage.stages.shard_load.packer import WORTH, ByteSource, InFiles, InMemory, Packer, Unpacked, packed_share
from offstage.stages.shard_load.place import refuse_infinite
from offstage.stages.shard_load.sources import Load, Sources, TensorSource, located

LARGE_BYTES = 32 * 2**20
"""What is only cast, and as large as that, is cast piece by piece."""
PIECE_BYTES = 4 * 2**20

Found = TypeVar("Found")
Tensors = Mapping[str, StoredTensor]


def fill_store(
    load: Load, sources: Sources, store: OffloadStore, *, check_finite: bool = False, full: bool = False
) -> dict[str, TensorSource]:
    """Return ``sources`` with where the ``store`` has them, after adding what isn't there, or damaged.

    A copy that doesn't shrink is none: its tensor is brought as it would be otherwise. ``full`` compares every checksum
    of the store, not a sample.
    """
    with store.locked():
        copied = {name: source for name, source in sources.items() if source.otherwise is not None}
        copies = _fill(
            store,
            _stored(load, copied),
            find=lambda wanted: store.find_packed(wanted, full=full),
            make=lambda absent: _pack(load, store, absent, copied, check_finite=check_finite),
        )
        settled = {
            name: copied[name].turned_back if copy is None else located(load, copied[name], (copy,))
            for name, copy in copies.items()
        }
        filled = {**sources, **settled}
        made = {name: source for name, source in filled.items() if source.wants_store}
        files = _fill(
            store,
            _stored(load, made),
            find=lambda wanted: store.find_all(wanted, full=full),
            make=lambda absent: _make(load, store, absent, made, check_finite=check_finite),
        )
    extents = {name: Extent(files[name], 0, source.spec.dtype, source.spec.shape) for name, source in made.items()}
    return {**filled, **{name: located(load, made[name], (extent,)) for name, extent in extents.items()}}


def _fill(
    store: OffloadStore,
    wanted: Tensors,
    *,
    find: Callable[[Tensors], dict[str, Found]],
    make: Callable[[Tensors], None],
) -> dict[str, Found]:
    """Return what ``find`` finds of all that is ``wanted``, once ``make`` has put into the store what it lacks."""
    found = find(wanted) if wanted else {}
    absent = {name: tensor for name, tensor in wanted.items() if name not in found}
    if absent:
        make(absent)
        store.publish()
        found |= find(absent)
    for name in (name for name in absent if name not in found):
        raise StorageError(
            f"{store.folder}: {name!r} isn't there as it was written; check the disk, or set offload_folder"
        )
    return found


def _stored(load: Load, sources: Sources) -> Tensors:
    return {
        name: StoredTensor(source.spec.dtype, source.spec.shape, tuple(load.step_of(source).source_names))
        for name, source in sources.items()
    }


def _make(load: Load, store: OffloadStore, absent: Tensors, sources: Sources, *, check_finite: bool) -> None:
    """Put the tensors ``absent`` into the store as they are used."""
    store.check_space(len(absent), sum(tensor.bytes for tensor in absent.values()))
    large = {name: extent for name in absent if (extent := _cast_source(load, sources[name])) is not None}
    for name, extent in large.items():
        pieces = _cast_pieces(load, sources[name], extent, check_finite=check_finite)
        store.put_pieces(name, absent[name].told, pieces)
    small = {name: sources[name] for name in absent if name not in large}
    for name, tensor in make_tensors(load, small, "offloading", devices=Devices()):
        if check_finite:
            refuse_infinite(load, name, tensor)
        store.put(name, absent[name], byte_view(tensor))
        del tensor  # or it would be held while the next one is made


def _cast_source(load: Load, source: TensorSource) -> Extent | None:
    """Return where a tensor lies that is large and only cast; null for any other.

    A run's budget may be less than one of its tensors, which then comes by blocks of rows: it mustn't be whole here.
    """
    step = load.step_of(source)
    extent = load.extent_of(step) if step.converter is None else None
    return extent if isinstance(extent, Extent) and extent.bytes >= LARGE_BYTES else None


def _cast_pieces(load: Load, source: TensorSource, extent: Extent, *, check_finite: bool) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, read from its ``extent`` and cast some rows at a time."""
    dtype, count = torch_dtype(source.spec.dtype), extent.shape[0]
    rows = max(1, PIECE_BYTES * count // extent.bytes)
    for begin in range(0, count, rows):
        piece = rows_of(extent, begin, min(begin + rows, count))
        assert piece is not None
        cast = read_extent(piece).to(dtype)
        if check_finite:
            refuse_infinite(load, source.spec.name, cast)
        yield byte_view(cast)


def _pack(load: Load, store: OffloadStore, absent: Tensors, sources: Sources, *, check_finite: bool) -> None:
    """Put copies of the tensors ``absent`` into the store: read where they lie, made first where they lie nowhere."""
    in_files = {name: tensor for name, tensor in absent.items() if sources[name].at}
    made = {name: tensor for name, tensor in absent.items() if name not in in_files}
    shares = {name: _share(load, sources[name]) for name in in_files}
    for name in (name for name, share in shares.items() if share > WORTH):
        store.note_plain(name, in_files.pop(name))
    needed = [tensor.bytes * shares.get(name, 1) for name, tensor in {**in_files, **made}.items()]
    store.check_space(len(needed), math.ceil(sum(needed)))
    with Packer() as packer, byte_bar("packing", sum(tensor.bytes for tensor in in_files.values())) as bar:
        for name, tensor in in_files.items():
            with (
                closing(_in_files(sources[name])) as data,  # last: threads that pack read from its files
                closing(packer.pack(unpacked := _unpacked(load, sources[name], data), bar.update)) as tiles,
            ):
                store.put_packed(name, tensor, tiles, run=unpacked.run)
    with Packer() as packer:
        for name, whole in make_tensors(load, {name: sources[name] for name in made}, "packing", devices=Devices()):
            if check_finite:
                refuse_infinite(load, name, whole)
            _pack_made(store, name, made[name], _unpacked(load, sources[name], InMemory(whole)), packer)
            del whole  # or it would be held while the next one is made


def _pack_made(store: OffloadStore, name: str, tensor: StoredTensor, unpacked: Unpacked, packer: Packer) -> None:
    if packed_share(unpacked) > WORTH:
        store.note_plain(name, tensor)
    else:
        store.put_packed(name, tensor, packer.pack(unpacked), run=unpacked.run)


def _in_files(source: TensorSource) -> InFiles:
    return InFiles([at for at in source.at if isinstance(at, Extent)])


def _share(load: Load, source: TensorSource) -> float:
    with closing(_in_files(source)) as data:
        return packed_share(_unpacked(load, source, data))


def _unpacked(load: Load, source: TensorSource, data: ByteSource) -> Unpacked:
    """Return what is to be packed; of experts so that each can be read alone."""
    spec, elements = source.spec, math.prod(source.spec.shape)
    run = elements // spec.shape[0] if spec.name in load.expert_names else elements
    return Unpacked(data, spec.dtype, elements, run)
