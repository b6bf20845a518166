"""Making tensors of the model from the checkpoint, as many at a time as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from offstage.stages.checkpoints.bulk_reader import BulkReader, TensorRead, can_be_cut, read_into_new_memory
from offstage.stages.checkpoints.byte_bar import byte_bar
from offstage.stages.checkpoints.dtypes import dtype_name, torch_dtype
from offstage.stages.checkpoints.packed import AtRest, PackedTensor, in_dtype
from offstage.stages.empty_init.names import Step
from offstage.stages.machine.aligned_memory import HostBlock
from offstage.stages.machine.devices import Devices
from offstage.stages.shard_load.conversions import build
from offstage.stages.shard_load.sources import Load, Sources
from offstage.stages.units import CPU

Progress = Callable[[int], object]
"""Is told of bytes as they are read."""

WINDOW_BYTES = 32 * 2**20
"""How much may be in memory at a time of tensors that don't stay there."""


def make_tensors(
    load: Load, wanted: Sources, doing: str, *, devices: Devices, host: HostBlock | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of ``wanted`` in its dtype, in the order of the files.

    ``doing`` names the progress bar. Tensors that lie in safetensors files are read in bulk: resident ones straight to
    their devices, those of the host into ``host`` if there is such a block, and all at once; those that only pass
    through the host on their way to the offload store ``WINDOW_BYTES`` at a time or one by one if they are larger.
    Tensors that are built come on the cpu.
    """
    total = sum(load.source_bytes(step) for step in _steps(load, wanted))
    with byte_bar(doing, total) as bar, BulkReader() as bulk:
        for steps in _batches(load, wanted):
            if _is_plain(load, steps[0]):
                pieces = _pieces(load, steps, wanted, devices=devices, host=host)
                bulk.read(pieces.values(), bar.update)
                yield from _let_go(pieces)
            else:
                built = _Built(bar.update)
                yield from _build(load, steps[0], wanted, bulk, built.add)
                built.settle(load.source_bytes(steps[0]))


def _batches(load: Load, wanted: Sources) -> Iterator[list[Step]]:
    """Yield the steps that make what is ``wanted``, those that can be read in bulk together."""
    batch: list[Step] = []
    waiting = 0
    for step in _steps(load, wanted):
        if not _is_plain(load, step):
            yield [step]
            continue
        size = _passing_bytes(load, step, wanted)
        if batch and waiting + size > WINDOW_BYTES:
            yield batch
            batch, waiting = [], 0
        batch.append(step)
        waiting += size
    if batch:
        yield batch


def _steps(load: Load, wanted: Sources) -> list[Step]:
    leaders = load.match.leaders
    return [step for step in load.match.steps if any(name in wanted for name in leaders[id(step)].values())]


def _passing_bytes(load: Load, step: Step, wanted: Sources) -> int:
    """Return the bytes that a plain step puts into memory for a while only: none if they stay on a device."""
    (name,) = load.match.leaders[id(step)].values()
    return 0 if wanted[name].way == "resident" else wanted[name].spec.bytes


def _is_plain(load: Load, step: Step) -> bool:
    return _plain_source(load, step) is not None


def _plain_source(load: Load, step: Step) -> AtRest | None:
    """Return where the one tensor that ``step`` makes is read from in bulk; null where it must be built."""
    source = load.extent_of(step)
    if isinstance(source, PackedTensor):
        (leader,) = load.match.leaders[id(step)].values()
        return in_dtype(source, load.skeleton.by_name[leader].dtype)
    return source if source is not None and can_be_cut(source) else None


def _pieces(
    load: Load, steps: Iterable[Step], wanted: Sources, *, devices: Devices, host: HostBlock | None
) -> dict[str, TensorRead]:
    """Return the pieces that read the tensors of plain steps into the places where they are to stay."""
    pieces: dict[str, TensorRead] = {}
    for step in steps:
        (leader,) = load.match.leaders[id(step)].values()
        extent, spec, stays = _plain_source(load, step), wanted[leader].spec, wanted[leader].way == "resident"
        assert extent is not None
        dtype, device = torch_dtype(spec.dtype), wanted[leader].home if stays else CPU
        if host is not None and stays and device == CPU:
            pieces[leader] = TensorRead(extent, host.empty(spec.shape, dtype))
        else:
            pieces[leader] = read_into_new_memory(extent, dtype, devices=devices, device=device, aligned=load.aligned)
    return pieces


def _let_go(pieces: dict[str, TensorRead]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors by name, and forget each as it is taken."""
    while pieces:
        name = next(iter(pieces))
        yield name, pieces.pop(name).target


class _Built:
    """Counts the bytes that were read to build tensors: some of what a step needs is read where nobody counts."""

    def __init__(self, update: Progress) -> None:
        self._update, self._counted = update, 0

    def add(self, count: int) -> None:
        """Count bytes as they are read."""
        self._counted += count
        self._update(count)

    def settle(self, total: int) -> None:
        """Count what is left of the ``total``."""
        self._update(total - self._counted)


def _build(
    load: Load, step: Step, wanted: Sources, bulk: BulkReader, progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    leaders = {target: name for target, name in load.match.leaders[id(step)].items() if name in wanted}
    dtypes = {target: wanted[name].spec.dtype for target, name in leaders.items()}

    def fill(places: Iterable[tuple[str, torch.Tensor]]) -> None:
        _fill(load, places, bulk, progress)

    for target, tensor in build(load.model, step, reader=load.reader, dtypes=dtypes, fill=fill):
        yield leaders[target], tensor
        del tensor  # or it would be held while the next one is made


def _fill(load: Load, places: Iterable[tuple[str, torch.Tensor]], bulk: BulkReader, progress: Progress) -> None:
    """Fill each view with the tensor beside it: in bulk where the view is contiguous, else one by one."""
    pieces = []
    for name, view in places:
        source = load.source_extent(name)
        if isinstance(source, PackedTensor):
            source = in_dtype(source, dtype_name(view.dtype))
        elif source is not None and not can_be_cut(source):
            source = None
        if source is not None and view.is_contiguous() and view.shape == source.shape:
            pieces.append(TensorRead(source, view))
        else:
            load.reader.fill(name, view)
    bulk.read(pieces, progress)
