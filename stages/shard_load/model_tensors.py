"""Making tensors of the model from the checkpoint, as many at a time as memory allows.

Most are somewhere in the checkpoint as they are, and read in bulk. Of the others, merges, splits and transposes,
transformers' own operations hold all sources and the result at once. The common ones only move data, so here each
source is read and written straight to its place in the result: no more is held than the result and one source. A
chain with any other operation is left to transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from offstage.stages.checkpoints.bulk_reader import BulkReader, TensorRead, can_be_cut, read_into_new_memory
from offstage.stages.checkpoints.byte_bar import byte_bar
from offstage.stages.checkpoints.dtypes import dtype_name, torch_dtype
from offstage.stages.checkpoints.packed import AtRest, PackedTensor, in_dtype
from offstage.stages.checkpoints.readers import SourceReader
from offstage.stages.empty_init.merges import as_piece
from offstage.stages.empty_init.names import NamingStep, convert
from offstage.stages.empty_init.skeleton import parent
from offstage.stages.machine.aligned_memory import HostBlock, room_for
from offstage.stages.machine.devices import Devices
from offstage.stages.shard_load.checkpoint_match import Load
from offstage.stages.shard_load.sources import Sources, TensorSource
from offstage.stages.units import CPU

Fill = Callable[[Iterable[tuple[str, torch.Tensor]]], None]
"""Fills each view with the tensor of the checkpoint that is named beside it, cast to the view's dtype."""

Step = tuple[NamingStep, Mapping[str, str]]
"""What makes tensors, and these by the step's targets."""

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
    steps = load.steps_for(wanted)
    with byte_bar(doing, sum(load.source_bytes(step) for step, _ in steps)) as bar, BulkReader() as bulk:
        for batch in _batches(load, steps, wanted):
            if isinstance(batch, tuple):
                yield from _build(load, batch, wanted, bulk, bar)
                continue
            reads = {name: _read_of(load, wanted[name], at, devices=devices, host=host) for name, at in batch.items()}
            bulk.read(reads.values(), bar.update)
            while reads:  # each forgotten as it is taken
                name = next(iter(reads))
                yield name, load.checked(name, reads.pop(name).target)


def _batches(load: Load, steps: Sequence[Step], wanted: Sources) -> Iterator[dict[str, AtRest] | Step]:
    """Yield each step by which a tensor must be built, and where those lie that can be read in bulk together."""
    batch: dict[str, AtRest] = {}
    waiting = 0
    for step, names in steps:
        name = next(iter(names.values()))
        spec = wanted[name].spec
        source = _in_bulk(load.extent_of(step), spec.dtype)
        if source is None:
            yield step, names
            continue
        passing = 0 if wanted[name].way == "resident" else spec.bytes
        if batch and waiting + passing > WINDOW_BYTES:
            yield batch
            batch, waiting = {}, 0
        batch[name] = source
        waiting += passing
    if batch:
        yield batch


def _in_bulk(source: AtRest | None, dtype: str) -> AtRest | None:
    """Return ``source`` as it can be read in bulk into a tensor of ``dtype``; null where it can't."""
    if isinstance(source, PackedTensor):
        return in_dtype(source, dtype)
    return source if source is not None and can_be_cut(source) else None


def _read_of(load: Load, source: TensorSource, at: AtRest, *, devices: Devices, host: HostBlock | None) -> TensorRead:
    """Return what reads a tensor that lies ``at`` into the place where it is to stay."""
    stays, dtype = source.way == "resident", torch_dtype(source.spec.dtype)
    device = source.home if stays else CPU
    if host is not None and stays and device == CPU:
        return TensorRead(at, host.empty(source.spec.shape, dtype))
    return read_into_new_memory(at, dtype, devices=devices, device=device, aligned=load.aligned)


def _build(
    load: Load, step_and_names: Step, wanted: Sources, bulk: BulkReader, bar: tqdm[Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    step, names = step_and_names
    dtypes = {target: wanted[name].spec.dtype for target, name in names.items()}
    before = bar.n
    fill = partial(_fill, load, bulk, bar.update)
    for target, tensor in build(load.model, step, reader=load.reader, dtypes=dtypes, fill=fill):
        yield names[target], load.checked(names[target], tensor)
        del tensor  # or it would be held while the next one is made
    bar.update(load.source_bytes(step) - (bar.n - before))  # some of it is read where nobody counts


def _fill(
    load: Load, bulk: BulkReader, progress: Callable[[int], object], places: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Fill each view with the tensor beside it: in bulk where the view is contiguous, else one by one."""
    pieces = []
    for name, view in places:
        source = _in_bulk(load.source_extent(name), dtype_name(view.dtype))
        if source is not None and view.is_contiguous() and view.shape == source.shape:
            pieces.append(TensorRead(source, view))
        else:
            load.reader.fill(name, view)
    bulk.read(pieces, progress)


def build(
    model: nn.Module, step: NamingStep, *, reader: SourceReader, dtypes: Mapping[str, str], fill: Fill
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield those targets of ``step`` that ``dtypes`` names, in these dtypes, contiguous, on the cpu.

    ``fill`` reads what goes to known places of a result; ``reader`` all else.
    """
    piece = None if step.converter is None else as_piece(step, reader.entries)
    made: dict[str, torch.Tensor] = {}
    if step.converter is not None and piece is None:
        made = _converted(model, step, reader=reader, dtype=torch_dtype(next(iter(dtypes.values()))))
    for name, dtype in dtypes.items():
        kind = torch_dtype(dtype)
        if piece is not None:
            tensor = room_for(piece.shape, kind).tensor
            fill(piece.places(tensor))
        elif step.converter is not None:
            tensor = made.pop(name).to(kind).contiguous()
        else:
            tensor = reader.read(step.source_names[0], kind) if step.sources else computed(model, name, kind)
        yield name, tensor
        del tensor  # or it would be held while the next one is made


def _converted(
    model: nn.Module, step: NamingStep, *, reader: SourceReader, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return what the step's converter makes, its sources cast before as transformers casts them."""
    converter, layer = deepcopy(step.converter), next(iter(step.targets))
    assert converter is not None
    for pattern, name in step.sources:
        converter.add_tensor(layer, name, pattern, reader.read(name, dtype))
    return convert(converter, layer, model)


def computed(model: nn.Module, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the parameter ``name``, which no checkpoint holds, as the model's class initialises it.

    The seed is fixed, so that every run has the same values; a class without a rule of its own has zeros.
    """
    module, attribute = model.get_submodule(parent(name)), name.rpartition(".")[2]
    waiting = module._parameters[attribute]
    assert waiting is not None
    fresh = nn.Parameter(torch.zeros(waiting.shape, dtype=dtype), requires_grad=False)
    others = [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
    for tensor in others:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    initialise = getattr(model, "_init_weights", None)
    module._parameters[attribute] = fresh
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            if initialise is not None:
                initialise(module)
    finally:
        module._parameters[attribute] = waiting
    return fresh.detach()
