"""Making tensors of the model from the checkpoint, as many at a time as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from tqdm import tqdm

from stages.empty_init.skeleton import TensorSpec
from stages.shard_load.building import build
from stages.shard_load.bulk import BulkReader, Piece, can_be_cut, new_piece
from stages.shard_load.load import Load
from stages.shard_load.names import Step
from stages.shard_load.reading import Extent, torch_dtype
from stages.units import CPU

WINDOW_BYTES = 32 * 2**20
"""How much may be in memory at a time of tensors that don't stay there."""


def make_tensors(load: Load, wanted: Collection[str], doing: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of ``wanted`` (names of leaders) in its dtype, on the cpu, in the order of the files.

    ``doing`` names the progress bar. Tensors that lie in safetensors files are read in bulk: those that stay on the
    host all at once, others ``WINDOW_BYTES`` at a time or one by one if they are larger.
    """
    names = set(wanted)
    total = sum(load.source_bytes(step) for step in _steps(load, names))
    bar = tqdm(total=total, unit="B", unit_scale=True, desc=doing, disable=None, leave=False)
    with bar, BulkReader() as bulk:
        for steps in _batches(load, names):
            if _is_plain(load, steps[0]):
                yield from _read(load, steps, bulk=bulk, progress=bar.update)
            else:
                yield from _build(load, steps[0], names, bulk)
                bar.update(load.source_bytes(steps[0]))


def _batches(load: Load, names: set[str]) -> Iterator[list[Step]]:
    """Yield the steps that make ``names``, those that can be read in bulk together."""
    batch: list[Step] = []
    waiting = 0
    for step in _steps(load, names):
        if not _is_plain(load, step):
            yield [step]
            continue
        size = _passing_bytes(load, step)
        if batch and waiting + size > WINDOW_BYTES:
            yield batch
            batch, waiting = [], 0
        batch.append(step)
        waiting += size
    if batch:
        yield batch


def _steps(load: Load, names: set[str]) -> list[Step]:
    return [step for step in load.layout.steps if names.intersection(load.layout.leaders[id(step)].values())]


def _passing_bytes(load: Load, step: Step) -> int:
    """Return the bytes that a plain step puts into memory for a while only: none if they stay on the host."""
    (name,) = load.layout.leaders[id(step)].values()
    return 0 if load.homes[name] == CPU else load.skeleton.by_name[name].bytes


def _is_plain(load: Load, step: Step) -> bool:
    extent = load.extent_of(step)
    return extent is not None and can_be_cut(extent)


def _read(
    load: Load, steps: Iterable[Step], *, bulk: BulkReader, progress: Callable[[int], object]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of plain steps, read in bulk and cast on the way."""
    pieces: dict[str, Piece] = {}
    for step in steps:
        (leader,) = load.layout.leaders[id(step)].values()
        spec, extent = load.skeleton.by_name[leader], load.extent_of(step)
        assert extent is not None
        pieces[leader] = _piece(load, spec, extent)
    bulk.read(pieces.values(), progress)
    while pieces:  # let go of each tensor as it is taken
        name = next(iter(pieces))
        yield name, pieces.pop(name).target


def _piece(load: Load, spec: TensorSpec, extent: Extent) -> Piece:
    """Return the piece that reads ``extent`` into the place where ``spec`` is to stay, or into new memory."""
    dtype = torch_dtype(spec.dtype)
    if load.host is not None and load.homes[spec.name] == CPU:
        return Piece(extent, load.host.empty(spec.shape, dtype))
    return new_piece(extent, dtype)


def _build(load: Load, step: Step, names: set[str], bulk: BulkReader) -> Iterator[tuple[str, torch.Tensor]]:
    leaders = {target: name for target, name in load.layout.leaders[id(step)].items() if name in names}
    dtypes = {target: load.skeleton.by_name[name].dtype for target, name in leaders.items()}

    def fill(places: Iterable[tuple[str, torch.Tensor]]) -> None:
        _fill(load, places, bulk)

    for target, tensor in build(load.model, step, reader=load.reader, dtypes=dtypes, fill=fill):
        yield leaders[target], tensor
        del tensor  # or it would be held while the next one is made


def _fill(load: Load, places: Iterable[tuple[str, torch.Tensor]], bulk: BulkReader) -> None:
    """Fill each view with the tensor beside it: in bulk where the view is contiguous, else one by one."""
    pieces = []
    for name, view in places:
        extent = load.source_extent(name)
        if extent is not None and can_be_cut(extent) and view.is_contiguous() and view.shape == extent.shape:
            pieces.append(Piece(extent, view))
        else:
            load.reader.fill(name, view)
    bulk.read(pieces, lambda count: None)
