"""A checkpoint and an adapter for it: two loads that fill one model.

The checkpoint's tensors go into the model as it is without the adapter, where names and layouts are those that it was
saved with. What lies in the adapter's file goes to the adapter's modules, and where it is a tensor of the model itself
(a bias, an embedding that was saved with it), it stands in the place of the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import nn

from offstage.stages.checkpoints.checkpoint import Checkpoint
from offstage.stages.checkpoints.packed import AtRest
from offstage.stages.checkpoints.readers import open_reader
from offstage.stages.empty_init.adapted_model import Unadapted, without_adapter
from offstage.stages.empty_init.names import Naming, NamingStep
from offstage.stages.empty_init.skeleton import Skeleton, parent
from offstage.stages.shard_load.checkpoint_match import match_checkpoint
from offstage.stages.shard_load.sources import Load, prepare

_PREFIX = "base_model.model."
"""What peft puts before the name of every tensor."""


def prepare_adapted(
    model: nn.Module,
    skeleton: Skeleton,
    *,
    checkpoint: Checkpoint,
    adapter: Checkpoint,
    strict: bool = True,
) -> list[Load]:
    """Return the loads of ``checkpoint`` and of ``adapter`` into ``model``, both checked from headers alone.

    A ``CheckpointError`` names the tensors of the adapter that don't fit the model, and what it lacks.
    """
    unadapted, reader = without_adapter(model), open_reader(adapter)
    naming = _naming(unadapted, reader.entries)
    targets = {target for step in naming.steps for target in step.targets} | set(unadapted.added.values())
    from_adapter = {spec.name for spec in skeleton.tensors if not targets.isdisjoint(skeleton.names_of(spec.name))}
    own = _part(skeleton, from_adapter)
    match = match_checkpoint(model, own, checkpoint=adapter, entries=reader.entries, strict=strict, naming=naming)
    plain = {name: outer for name, outer in unadapted.names.items() if outer not in from_adapter}
    base = prepare(
        unadapted.model,
        _renamed(_part(skeleton, set(plain.values())), {outer: name for name, outer in plain.items()}),
        checkpoint=checkpoint,
        strict=strict,
    )
    return [replace(base, names=plain), Load(model, own, adapter, reader, match, aligned=True)]


def _naming(unadapted: Unadapted, entries: Mapping[str, AtRest]) -> Naming:
    """Return what each tensor of the adapter's file is in the model."""
    known = {outer: outer for outer in unadapted.names.values()} | dict(unadapted.added)
    targets = {name: known.get(name.removeprefix(_PREFIX)) for name in entries}
    return Naming(
        steps=tuple(
            NamingStep({target: entries[name].shape}, (("", name),)) for name, target in targets.items() if target
        ),
        unexpected=tuple(name for name, target in targets.items() if target is None),
        source="adapter",
        together="model.adapter and model.path",
    )


def _part(skeleton: Skeleton, names: Collection[str]) -> Skeleton:
    """Return ``skeleton`` with no other tensors than those of ``names``."""
    return replace(
        skeleton,
        tensors=tuple(spec for spec in skeleton.tensors if spec.name in names),
        tied=tuple(group for group in skeleton.tied if not set(group).isdisjoint(names)),
        experts=tuple(spec for spec in skeleton.experts if set(spec.tensors) <= set(names)),
    )


def _renamed(skeleton: Skeleton, names: Mapping[str, str]) -> Skeleton:
    """Return ``skeleton`` with its tensors called as ``names`` says; the first of a tied group stays the first."""
    return replace(
        skeleton,
        tensors=tuple(replace(spec, name=names[spec.name]) for spec in skeleton.tensors),
        tied=tuple(tuple(names[name] for name in group) for group in skeleton.tied),
        experts=tuple(
            replace(spec, tensors=tuple(names[name] for name in spec.tensors), module=parent(names[spec.tensors[0]]))
            for spec in skeleton.experts
        ),
    )
