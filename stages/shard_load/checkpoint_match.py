"""The checkpoint held against the skeleton: which step makes which tensor, and what doesn't fit.

Everything is checked from headers, before a byte of data is read. All that is wrong is told at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.checkpoint import Checkpoint
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.packed import AtRest
from offstage.stages.empty_init.names import Naming, NamingStep, ignorable, name_tensors
from offstage.stages.empty_init.siblings import missing_sibling
from offstage.stages.empty_init.skeleton import Skeleton, TensorSpec, parent

_log = logging.getLogger(__name__)

LISTED = 20
"""How many tensors an error names before it counts the rest."""


@dataclass(frozen=True)
class CheckpointMatch:
    """What makes each tensor of the model.

    ``origins`` maps the name that stands for a tensor (the leader of its tied group) to its step and to the
    name that it has among the step's targets. ``twins`` are pairs of names in the checkpoint that are one
    tied tensor in the model, and so must hold the same values.
    """

    origins: Mapping[str, tuple[NamingStep, str]]
    twins: tuple[tuple[str, str], ...] = ()

    @cached_property
    def steps(self) -> tuple[NamingStep, ...]:
        """The steps, each once, in the order of ``origins``."""
        return tuple({id(step): step for step, _ in self.origins.values()}.values())

    @cached_property
    def leaders(self) -> Mapping[int, Mapping[str, str]]:
        """For each step (by ``id``), the leaders of the targets that are used of it."""
        leaders: dict[int, dict[str, str]] = {}
        for leader, (step, target) in self.origins.items():
            leaders.setdefault(id(step), {})[target] = leader
        return leaders


@dataclass(slots=True)
class _Misfits:
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    miscast: list[str] = field(default_factory=list)


def match_checkpoint(
    model: nn.Module,
    skeleton: Skeleton,
    *,
    checkpoint: Checkpoint,
    entries: Mapping[str, AtRest],
    strict: bool = True,
    partial: bool = False,
    naming: Naming | None = None,
) -> CheckpointMatch:
    """Return what makes each tensor of ``skeleton``, or raise one ``CheckpointError`` that names all that
    is wrong.

    Tied names are resolved first: one of a group suffices. What the model class declares ignorable is
    passed over. Without ``strict``, tensors that the model has no place for are a warning; with ``partial``,
    so are those that the checkpoint lacks, which nothing then makes. ``naming`` says what is made of what, where that
    isn't the model's own rule.
    """
    naming = naming or name_tensors(model, entries)
    may_miss, may_exceed = ignorable(model)
    made = {target: step for step in naming.steps for target in step.targets}
    misfits = _Misfits(unexpected=[n for n in naming.unexpected if not (may_exceed and may_exceed.search(n))])
    origins: dict[str, tuple[NamingStep, str]] = {}
    twins: list[tuple[str, str]] = []
    for names, spec in _loaded(skeleton):
        present = [name for name in names if name in made]
        optional = may_miss is not None and any(may_miss.search(name) for name in names)
        if present:
            origins[spec.name] = (made[present[0]], present[0])
            twins += _twins(made, present)
            _check_fit(misfits, spec, step=made[present[0]], target=present[0], entries=entries)
        if not present and not optional:
            misfits.missing.append(spec.name)
        if not present and optional and spec.kind == "parameter":
            origins[spec.name] = (NamingStep({spec.name: spec.shape}, ()), spec.name)
    if not strict:
        _warn(checkpoint, "were not used when loading, the model has no place for them", misfits.unexpected)
    if partial:
        on_meta = [name for name in misfits.missing if _is_meta(model, name)]
        kept = [name for name in misfits.missing if name not in on_meta]
        _warn(checkpoint, "are not in the checkpoint, the model keeps what it has", kept)
        _warn(checkpoint, "are not in the checkpoint and stay on the meta device, give them values", on_meta)
        misfits.missing.clear()
    _raise_misfits(checkpoint, skeleton, misfits, naming)
    return CheckpointMatch(_by_place(origins, entries), tuple(twins))


def _loaded(skeleton: Skeleton) -> Iterable[tuple[tuple[str, ...], TensorSpec]]:
    """Yield the tensors that a checkpoint is to hold, tied ones once, with all the names of each."""
    for spec in skeleton.unique:
        if spec.persistent:
            yield skeleton.names_of(spec.name), spec


def _twins(made: Mapping[str, NamingStep], present: list[str]) -> list[tuple[str, str]]:
    """Return the pairs of sources that must be equal; where a converter made one of them there is none to compare."""
    sources = [made[name].source_names[0] for name in present if made[name].converter is None]
    return [(sources[0], other) for other in sources[1:]]


def _check_fit(
    misfits: _Misfits, spec: TensorSpec, *, step: NamingStep, target: str, entries: Mapping[str, AtRest]
) -> None:
    shape = step.targets[target]
    if shape != spec.shape:
        missing = missing_sibling(step.sources) if step.converter else None
        without = f" (there is no {missing!r})" if missing else ""
        misfits.misshapen.append(f"{spec.name!r} is {list(shape)} instead of {list(spec.shape)}{without}")
    miscast = [name for name in step.source_names if _kind(entries[name].dtype) != _kind(spec.dtype)]
    if miscast:
        whose = spec.name if step.converter is None else miscast[0]
        misfits.miscast.append(f"{whose!r} is {entries[miscast[0]].dtype} where {spec.dtype} belongs")


def _kind(dtype: str) -> str:
    kind = torch_dtype(dtype)
    if kind.is_floating_point or kind.is_complex:
        return "complex" if kind.is_complex else "float"
    return "bool" if kind is torch.bool else "integer"


def _warn(checkpoint: Checkpoint, what: str, names: list[str]) -> None:
    """Say ``what`` of the tensors ``names``, if there are any, and forget them."""
    if names:
        _log.warning("%s: tensors %s: %s", checkpoint.path, what, _told(names))
        names.clear()


def _is_meta(model: nn.Module, name: str) -> bool:
    tensor: torch.Tensor = getattr(model.get_submodule(parent(name)), name.rpartition(".")[2])
    return tensor.is_meta


def _told(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(repr(name) for name in names[:LISTED]) + more


def _raise_misfits(checkpoint: Checkpoint, skeleton: Skeleton, misfits: _Misfits, naming: Naming) -> None:
    kinds = {
        "missing": [repr(name) for name in misfits.missing],
        "unexpected": [repr(name) for name in misfits.unexpected],
        "of another shape": misfits.misshapen,
        "of another kind of number": misfits.miscast,
    }
    total = sum(map(len, kinds.values()))
    if not total:
        return
    told, room = [], LISTED
    for kind, tensors in kinds.items():
        if tensors:
            told.append(f"{len(tensors)} {kind}" + (f": {', '.join(tensors[:room])}" if room else ""))
        room = max(0, room - len(tensors))
    more = f" (and {total - LISTED} more)" if total > LISTED else ""
    raise CheckpointError(
        f"{checkpoint.path}: the {naming.source} is not that of {skeleton.model_class or 'the model'}: "
        f"{'; '.join(told)}{more}; do {naming.together} belong together?"
    )


def _by_place(
    origins: Mapping[str, tuple[NamingStep, str]], entries: Mapping[str, AtRest]
) -> dict[str, tuple[NamingStep, str]]:
    """Return ``origins`` in the order in which the first sources lie in the files, so that reads run forward."""

    def place(item: tuple[str, tuple[NamingStep, str]]) -> tuple[str, int]:
        sources = item[1][0].source_names
        return (entries[sources[0]].file.name, entries[sources[0]].begin) if sources else ("", 0)

    return dict(sorted(origins.items(), key=place))
