"""What the tensors of a model rest in, where its checkpoint is of packed tensors: known from headers alone.

A plan counts the bytes at rest wherever they lie or move. So the skeleton of such a model says what each tensor rests
in, by the same steps that its weights will be loaded by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from torch import nn

from offstage.stages.checkpoints.checkpoint import Checkpoint
from offstage.stages.checkpoints.device_codec import can_unpack, device_parts, moved_bytes
from offstage.stages.checkpoints.packed import SCRATCH_BYTES, AtRest, PackedTensor, in_dtype, rest_bytes
from offstage.stages.checkpoints.packed_reads import working_bytes
from offstage.stages.checkpoints.readers import open_reader
from offstage.stages.empty_init.adapted_model import without_adapter
from offstage.stages.empty_init.declared import DeclaredCheckpoint
from offstage.stages.empty_init.merges import sources_in_order
from offstage.stages.empty_init.names import NamingStep, name_tensors
from offstage.stages.empty_init.packed_modules import as_they_rest
from offstage.stages.empty_init.skeleton import DeviceUnpacking, PackedSpec, Skeleton, TensorSpec


def with_packed(
    skeleton: Skeleton, model: nn.Module, checkpoint: Checkpoint | DeclaredCheckpoint, *, adapted: bool
) -> Skeleton:
    """Return ``skeleton``, which is that of ``model``, with what each tensor rests in of ``checkpoint``.

    A model that is ``adapted`` has the checkpoint's tensors under other names.
    """
    if isinstance(checkpoint, Checkpoint):
        entries, naming = as_they_rest(model, open_reader(checkpoint).entries), None
    else:
        entries = open_reader(checkpoint.checkpoint).entries
        naming = checkpoint.naming_of(entries)
    unadapted = without_adapter(model) if adapted else None
    naming = naming or name_tensors(model if unadapted is None else unadapted.model, entries)
    outer = {} if unadapted is None else unadapted.names
    step_of = {outer.get(target, target): step for step in naming.steps for target in step.targets}
    experts = {name for spec in skeleton.experts for name in spec.tensors}
    packed_of: dict[str, PackedSpec | None] = {}
    for spec in skeleton.unique:
        names = skeleton.names_of(spec.name)
        step = next((step_of[name] for name in names if name in step_of), None)
        packed = None if step is None else _packed(step, spec, entries, by_expert=spec.name in experts)
        packed_of |= dict.fromkeys(names, packed)
    return replace(skeleton, tensors=tuple(replace(spec, packed=packed_of[spec.name]) for spec in skeleton.tensors))


def _packed(step: NamingStep, spec: TensorSpec, entries: Mapping[str, AtRest], *, by_expert: bool) -> PackedSpec | None:
    """Return what the tensor ``spec`` rests in; null where it is as it is used, or is made anew of what ``step`` has.

    Several sources, one after the other, are read as they are ``by_expert``.
    """
    sources = [in_dtype(entries[name], spec.dtype) for name in sources_in_order(step, entries)]
    parts = [source for source in sources if source is not None]
    bulk = next((part for part in parts if isinstance(part, PackedTensor)), None)
    if bulk is None or len(parts) < len(sources):
        return None
    alone = len(parts) == 1 and bulk.shape == spec.shape
    by_row = bulk.codec.rows(bulk, 0, 1) is not None if alone else _are_rows(parts, spec.shape)
    if not (by_row if by_expert else alone):
        return None
    alike = _alike(part for part in parts if isinstance(part, PackedTensor))
    one = bulk.codec.rows(bulk, 0, 1) if alone and by_expert else None
    device = _on_device(alike, [first for first, *_ in alike] if one is None else [one])
    working = working_bytes(bulk.codec.blocks(bulk), SCRATCH_BYTES)
    return PackedSpec(bulk.codec.name, sum(map(rest_bytes, parts)), working, by_row, device)


def _alike(tensors: Iterable[PackedTensor]) -> list[list[PackedTensor]]:
    """Return those of ``tensors`` together that are alike in all that unpacking them takes hangs on, but for where they
    lie. A layer's experts are all alike, or there are a few kinds of them.
    """
    groups: dict[object, list[PackedTensor]] = {}
    for tensor in tensors:
        parts = tuple((part.dtype, part.shape) for part in tensor.parts)
        groups.setdefault((tensor.codec, tensor.dtype, tensor.shape, parts), []).append(tensor)
    return list(groups.values())


def _on_device(alike: Sequence[list[PackedTensor]], brought: Sequence[PackedTensor]) -> DeviceUnpacking | None:
    """Return what it takes an accelerator to unpack tensors, of which some are ``alike``, by pieces like those
    ``brought``; null where only the host can.
    """
    if not all(can_unpack(first) for first, *_ in alike):
        return None
    return DeviceUnpacking(*device_parts(brought), sum(len(some) * moved_bytes(some[0]) for some in alike))


def _are_rows(parts: Sequence[AtRest], shape: tuple[int, ...]) -> bool:
    """Return whether ``parts``, one after the other, are a tensor of ``shape``, each within a row of it."""
    row = math.prod(shape[1:])
    ends = list(accumulate(math.prod(part.shape) for part in parts))
    begins = [0, *ends[:-1]]
    within = all(begin // row == (end - 1) // row for begin, end in zip(begins, ends, strict=True)) if row else False
    return within and ends[-1] == math.prod(shape)
