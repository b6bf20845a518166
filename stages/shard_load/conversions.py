"""Making tensors of the model that are not simply somewhere in the checkpoint: merges, splits, transposes.

transformers' own operations hold all sources and the result at once. The common ones only move data, so here each
source is read and written straight to its place in the result: no more is held than the result and one source. A
chain with any other operation is left to transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy

import torch
from torch import nn

from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.readers import SourceReader
from offstage.stages.empty_init.merges import Piece, as_piece
from offstage.stages.empty_init.names import Step, convert
from offstage.stages.empty_init.skeleton import parent
from offstage.stages.machine.aligned_memory import room_for

Fill = Callable[[Iterable[tuple[str, torch.Tensor]]], None]
"""Fills each view with the tensor of the checkpoint that is named beside it, cast to the view's dtype."""


def build(
    model: nn.Module, step: Step, *, reader: SourceReader, dtypes: Mapping[str, str], fill: Fill
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield those targets of ``step`` that ``dtypes`` names, in these dtypes, contiguous, on the cpu.

    ``fill`` reads what goes to known places of a result; ``reader`` all else.
    """
    for name, dtype in dtypes.items() if step.converter is None else ():
        kind = torch_dtype(dtype)
        yield name, reader.read(step.source_names[0], kind) if step.sources else computed(model, name, kind)
    if step.converter is not None:
        yield from _merged(model, step, reader=reader, dtypes=dtypes, fill=fill)


def _merged(
    model: nn.Module, step: Step, *, reader: SourceReader, dtypes: Mapping[str, str], fill: Fill
) -> Iterator[tuple[str, torch.Tensor]]:
    piece = as_piece(step, reader.entries)
    made: dict[str, torch.Tensor] = {}
    if piece is None:
        made = _converted(model, step, reader=reader, dtype=torch_dtype(next(iter(dtypes.values()))))
    for name, dtype in dtypes.items():
        kind = torch_dtype(dtype)
        yield name, _gathered(piece, kind, fill) if piece else made.pop(name).to(kind).contiguous()


def _gathered(piece: Piece, dtype: torch.dtype, fill: Fill) -> torch.Tensor:
    result = room_for(piece.shape, dtype).tensor
    fill(piece.places(result))
    return result


def _converted(model: nn.Module, step: Step, *, reader: SourceReader, dtype: torch.dtype) -> dict[str, torch.Tensor]:
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
