"""Filling an offload store with what a plain checkpoint is once it is quantised: made once, for all runs of it.

The store is one for the checkpoint and the format, whatever the dtype of a run. Weights are read past the page cache,
quantised some rows at a time on all cores, and handed over in order: no more is held than a few bands of rows. A file
counts once it is whole and the index names it, so that a run which was killed is gone on with where it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from offstage.pipeline.cache.fingerprint import fingerprint
from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.byte_bar import byte_bar
from offstage.stages.checkpoints.checkpoint import Checkpoint, identity
from offstage.stages.checkpoints.codecs.quantisers import QUANTISERS
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.quantised_copy import CopyFile, QuantisedCopy
from offstage.stages.checkpoints.readers import open_reader
from offstage.stages.machine.aligned_memory import byte_view
from offstage.stages.shard_load.checkpoint_match import Load
from offstage.stages.shard_load.offload_store import OffloadStore, StoredTensor, Wanted
from offstage.stages.shard_load.stored_weights import PIECE_BYTES, ByteReader, bytes_of, in_order, opened

VERSION = 1
"""Of how copies are laid out, and of the quantisers' arithmetic: what was made by another is made anew."""
_BAND_VALUES = 2**18
"""How many values are quantised together, unless the format has more in one band of rows."""
_VALUES_AHEAD = 2**22
"""How many are in memory at a time, a dozen bytes each as floats, codes and what is made on the way."""

Progress = Callable[[int], object]
OpenTensor = Callable[[str], AbstractContextManager[ByteReader]]


def copy_key(checkpoint: Checkpoint) -> str:
    """Return what the store of the copy of ``checkpoint`` is known by."""
    copy = _copy_of(checkpoint)
    content = {"checkpoint": identity(checkpoint), "format": copy.format, "weights": sorted(copy.quantised)}
    return fingerprint({"quantised": content, "version": VERSION})


def files_for(checkpoint: Checkpoint, loads: Iterable[Load]) -> list[CopyFile]:
    """Return those files of the copy of ``checkpoint`` that ``loads`` bring anything of: not all, on one of several
    hosts.
    """
    wanted = {name for load in loads for step, _ in load.origins.values() for name in step.source_names}
    return [one for one in _copy_of(checkpoint).files if not wanted.isdisjoint(one.tensors)]


def fill_copy(
    checkpoint: Checkpoint, files: Sequence[CopyFile], store: OffloadStore, *, full: bool = False
) -> Checkpoint:
    """Return ``checkpoint`` with those ``files`` of its copy where the ``store`` has them, after adding what isn't
    there, or damaged.

    ``full`` compares every checksum of the store, not a sample. A ``CheckpointError`` names a tensor that can't be
    quantised: it has a NaN or an infinity, or values that are too large.
    """
    copy = _copy_of(checkpoint)
    wanted = {one.file.name: _stored(copy, one) for one in files}
    with store.locked():
        located = store.fill(wanted, partial(_add, checkpoint, store, files), full=full)
    return replace(checkpoint, copy=copy.located({name: at.file for name, at in located.items() if at is not None}))


def _copy_of(checkpoint: Checkpoint) -> QuantisedCopy:
    assert checkpoint.copy is not None, checkpoint.path
    return checkpoint.copy


def _stored(copy: QuantisedCopy, one: CopyFile) -> StoredTensor:
    used = sum(copy.sources[name].bytes for name in one.tensors)
    return StoredTensor("uint8", (one.file.size,), tuple(one.tensors), codec=copy.format, used_bytes=used)


def _add(checkpoint: Checkpoint, store: OffloadStore, files: Iterable[CopyFile], absent: Wanted) -> None:
    """Put those of ``files`` that are ``absent`` into the store, each in the index before the next one is begun."""
    copy = _copy_of(checkpoint)
    store.check_space(len(absent), sum(one.bytes for one in absent.values()))
    total = sum(one.used_bytes for one in absent.values())
    with byte_bar("quantising", total) as bar, _opener(checkpoint, copy) as open_tensor:
        for one in (one for one in files if one.file.name in absent):
            with closing(_pieces(copy, one, open_tensor, bar.update)) as pieces:
                store.put(one.file.name, absent[one.file.name], pieces)
            store.publish()


@contextmanager
def _opener(checkpoint: Checkpoint, copy: QuantisedCopy) -> Iterator[OpenTensor]:
    """Yield what opens a tensor of the plain ``checkpoint`` to read its bytes."""
    plain = replace(checkpoint, copy=None)
    if plain.tells_places:
        yield lambda name: opened([copy.sources[name]])
        return
    reader = open_reader(plain)
    yield lambda name: nullcontext(bytes_of(reader.borrow(name).contiguous()))
    reader.release()


def _pieces(copy: QuantisedCopy, one: CopyFile, open_tensor: OpenTensor, progress: Progress) -> Generator[memoryview]:
    """Yield the bytes of the file ``one``, in order, as they are made."""
    end = 0
    for name, parts in one.tensors.items():
        yield memoryview(bytes(parts[0].begin - end))
        with open_tensor(name) as read:
            yield from _in_parts(parts, _made(copy, name, read, progress))
        end = parts[-1].end


def _in_parts(parts: Sequence[Extent], bands: Iterable[list[torch.Tensor]]) -> Iterator[memoryview]:
    """Yield the bytes of a tensor's ``parts``, one after the other: of the first as ``bands`` come, then the others,
    which are small, with what lies between them.
    """
    kept: list[list[torch.Tensor]] = [[] for _ in parts[1:]]
    for bulk, *others in bands:
        yield byte_view(bulk)
        for pieces, tensor in zip(kept, others, strict=True):
            pieces.append(tensor)
    for (before, part), pieces in zip(pairwise(parts), kept, strict=True):
        yield memoryview(bytes(part.begin - before.end))
        yield byte_view(torch.cat(pieces))


def _made(copy: QuantisedCopy, name: str, read: ByteReader, progress: Progress) -> Generator[list[torch.Tensor]]:
    """Yield what the tensor ``name`` is quantised to, some rows at a time, each part of it as bytes."""
    source = copy.sources[name]
    if name not in copy.quantised:
        for begin in range(0, source.bytes, PIECE_BYTES):
            data = read(begin, min(begin + PIECE_BYTES, source.bytes))
            yield [torch.from_numpy(data)]
            progress(len(data))
        return
    bands = _bands(source.shape, QUANTISERS[copy.format].rows_together)
    width = source.bytes // math.prod(source.shape[:-1])
    ahead = _VALUES_AHEAD // max(_BAND_VALUES, QUANTISERS[copy.format].rows_together * source.shape[-1])
    with closing(in_order(partial(_quantise, copy, name, read), bands, most=ahead)) as quantised:
        for (begin, end), parts in quantised:
            yield parts
            progress((end - begin) * width)


def _bands(shape: tuple[int, ...], together: int) -> Iterator[tuple[int, int]]:
    """Yield rows of the matrices ``shape``, counted through all of them: so many of one matrix, or what is left."""
    *stack, rows, columns = shape
    step = together * max(1, _BAND_VALUES // max(1, columns * together))
    for first in range(0, math.prod(stack) * rows, max(1, rows)):
        yield from pairwise((*range(first, first + rows, step), first + rows))


def _quantise(copy: QuantisedCopy, name: str, read: ByteReader, rows: tuple[int, int]) -> list[torch.Tensor]:
    source, quantiser = copy.sources[name], QUANTISERS[copy.format]
    begin, end = rows
    width = source.bytes // math.prod(source.shape[:-1])
    data = torch.from_numpy(read(begin * width, end * width)).view(torch_dtype(source.dtype))
    try:
        return list(quantiser.quantise(data.view(end - begin, -1).to(torch.float32, copy=True)))
    except OverflowError as error:
        raise CheckpointError(
            f"{source.file.path}: tensor {name!r} holds NaN, infinity or numbers too large for {copy.format}; leave "
            "model.quantize null"
        ) from error
