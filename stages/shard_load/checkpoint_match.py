"""The checkpoint held against the skeleton: which step makes which tensor, and what doesn't fit.

Everything is checked from headers, before a byte of data is read. All that is wrong is told at once.

A checkpoint and an adapter for it are two loads that fill one model. The checkpoint's tensors go into the model as it
is without the adapter, where names and layouts are those that it was saved with. What lies in the adapter's file goes
to the adapter's modules, and where it is a tensor of the model itself (a bias, an embedding that was saved with it), it
stands in the place of the checkpoint's.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from offstage.pipeline.cache.fingerprint import fingerprint
from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.checkpoint import Checkpoint, identity
from offstage.stages.checkpoints.codecs import loops
from offstage.stages.checkpoints.dtypes import dtype_name, torch_dtype
from offstage.stages.checkpoints.packed import AtRest, PackedTensor, rest_bytes
from offstage.stages.checkpoints.readers import SafetensorsReader, SourceReader, open_reader, open_stored_reader
from offstage.stages.empty_init.adapted_model import Unadapted, without_adapter
from offstage.stages.empty_init.merges import sources_in_order
from offstage.stages.empty_init.names import Naming, NamingStep, ignorable, name_tensors
from offstage.stages.empty_init.packed_modules import as_they_rest, packed_modules
from offstage.stages.empty_init.siblings import missing_sibling
from offstage.stages.empty_init.skeleton import Skeleton, TensorSpec, parent

_log = logging.getLogger(__name__)

LISTED = 20
"""How many tensors an error names before it counts the rest."""

_PREFIX = "base_model.model."
"""What peft puts before the name of every tensor."""


@dataclass(frozen=True)
class Load:
    """A checkpoint held against the model that it fills.

    ``origins`` maps the name that stands for a tensor (the leader of its tied group) to the step that makes it and to
    the name that it has among the step's targets. ``twins`` are pairs of names in the checkpoint that are one tied
    tensor in the model, and so must hold the same values.

    ``names`` are those that tensors have where what is loaded is used, if they are others than ``model`` has. Tensors
    are ``aligned`` wherever they lie in their file where the library that they are compared with copies them, as peft
    does those of an adapter; others are used as they lie, as transformers maps them. With ``check_finite`` no NaN and
    no infinity is loaded.
    """

    model: nn.Module
    skeleton: Skeleton
    checkpoint: Checkpoint
    reader: SourceReader
    origins: Mapping[str, tuple[NamingStep, str]]
    twins: tuple[tuple[str, str], ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    aligned: bool = False
    check_finite: bool = False

    @cached_property
    def expert_names(self) -> frozenset[str]:
        """The names of all tensors that have a row for each expert of a mixture."""
        return frozenset(name for spec in self.skeleton.experts for name in spec.tensors)

    @property
    def store_key(self) -> str:
        """What an offload store of these tensors is known by: which checkpoint it is, in the dtype of most bytes."""
        bytes_by_dtype: Counter[str] = Counter()
        for spec in self.skeleton.unique:
            bytes_by_dtype[spec.dtype] += spec.bytes
        content = {"checkpoint": identity(self.checkpoint), "dtype": bytes_by_dtype.most_common(1)[0][0]}
        copy = self.checkpoint.copy
        return fingerprint(content if copy is None else {**content, "quantised": [copy.format, sorted(copy.quantised)]})

    def outer_names(self, name: str) -> list[str]:
        """Return all names that the tensor ``name`` has where what is loaded is used, tied ones included."""
        return [self.names.get(each, each) for each in self.skeleton.names_of(name)]

    def step_of(self, name: str) -> NamingStep:
        """Return the step that makes the tensor ``name``."""
        return self.origins[name][0]

    def steps_for(self, wanted: Container[str]) -> list[tuple[NamingStep, dict[str, str]]]:
        """Return each step that makes tensors ``wanted``, in the order of the files, and these by its targets."""
        steps: dict[int, tuple[NamingStep, dict[str, str]]] = {}
        for name, (step, target) in self.origins.items():
            if name in wanted:
                steps.setdefault(id(step), (step, {}))[1][target] = name
        return list(steps.values())

    def pieces_of(self, step: NamingStep) -> tuple[str, ...]:
        """Return the tensors of the checkpoint that the one which ``step`` makes is, one after the other, if any."""
        return sources_in_order(step, self.reader.entries)

    def source_bytes(self, step: NamingStep) -> int:
        """Return the bytes of the tensors in the checkpoint that ``step`` reads, as they rest."""
        return sum(rest_bytes(self.reader.entries[name]) for name in step.source_names)

    def extent_of(self, step: NamingStep) -> AtRest | None:
        """Return where the one tensor lies that ``step`` takes as it is; null if it makes one, or in a pickle."""
        names = self.pieces_of(step) if len(step.sources) == 1 else ()
        extent = self.source_extent(names[0]) if names else None
        return extent if extent is not None and (extent.shape,) == tuple(step.targets.values()) else None

    def source_extent(self, name: str) -> AtRest | None:
        """Return where the tensor that the checkpoint calls ``name`` lies; null if in a pickle."""
        return self.reader.entries[name] if self.checkpoint.tells_places else None

    def checked(self, name: str, tensor: torch.Tensor, *, source: str | None = None) -> torch.Tensor:
        """Return ``tensor``, which the model calls ``name``, or of which the checkpoint calls a part ``source``.

        With ``check_finite`` one that holds a NaN or an infinity is a ``CheckpointError``.
        """
        if self.check_finite and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            sources = [source] if source else self.step_of(name).source_names
            where = self.reader.entries[sources[0]].file.path if sources else self.checkpoint.path
            raise CheckpointError(
                f"{where}: tensor {source or name!r} holds NaN or infinity as {dtype_name(tensor.dtype)}; "
                "take another dtype, or set check_finite=false"
            )
        return tensor

    def check_twins(self) -> None:
        """Refuse a checkpoint that has different values for two names that are one tensor in the model."""
        for name, other in self.twins:
            first, second = self.reader.borrow(name), self.reader.borrow(other)
            if first.shape != second.shape or not torch.equal(first, second):
                raise CheckpointError(
                    f"{self.checkpoint.path}: tensors {name!r} and {other!r} are tied in the model and differ in the "
                    "checkpoint; set tie_word_embeddings to false in config.json if they are two"
                )


def prepare(
    model: nn.Module, skeleton: Skeleton, *, checkpoint: Checkpoint, strict: bool = True, partial: bool = False
) -> Load:
    """Return ``checkpoint`` held against ``model``, checked against its ``skeleton`` from headers alone.

    Tied names are resolved first: one of a group suffices. What the model class declares ignorable is passed over. All
    that is wrong is one ``CheckpointError``. Without ``strict``, tensors that the model has no place for are a warning;
    with ``partial``, so are those that the checkpoint lacks, which nothing then makes. A model that computes with codes
    and scales itself has them as the files do.
    """
    reader = open_reader(checkpoint)
    if any(isinstance(entry, PackedTensor) for entry in reader.entries.values()):
        loops.build()  # now, before any weight is there: a compiler takes memory too
    scales = checkpoint.stored.keys() - reader.entries.keys()
    if packed_modules(model):
        reader = SafetensorsReader(as_they_rest(model, reader.entries))
    elif any(spec.name in scales for spec in skeleton.tensors):
        reader = open_stored_reader(checkpoint)
    naming = name_tensors(model, reader.entries)
    return _matched(Load(model, skeleton, checkpoint, reader, {}), naming, strict=strict, partial=partial)


def prepare_adapted(
    model: nn.Module, skeleton: Skeleton, *, checkpoint: Checkpoint, adapter: Checkpoint, strict: bool = True
) -> list[Load]:
    """Return the loads of ``checkpoint`` and of ``adapter`` into ``model``, both checked from headers alone.

    A ``CheckpointError`` names the tensors of the adapter that don't fit the model, and what it lacks.
    """
    unadapted, reader = without_adapter(model), open_reader(adapter)
    naming = _adapter_naming(unadapted, reader.entries)
    targets = {target for step in naming.steps for target in step.targets} | set(unadapted.added.values())
    from_adapter = {spec.name for spec in skeleton.tensors if not targets.isdisjoint(skeleton.names_of(spec.name))}
    plain = {name: outer for name, outer in unadapted.names.items() if outer not in from_adapter}
    part = _part(skeleton, {name: name for name in from_adapter})
    own = _matched(Load(model, part, adapter, reader, {}, aligned=True), naming, strict=strict)
    base = _part(skeleton, {outer: name for name, outer in plain.items()})
    return [replace(prepare(unadapted.model, base, checkpoint=checkpoint, strict=strict), names=plain), own]


def _matched(load: Load, naming: Naming, *, strict: bool, partial: bool = False) -> Load:
    """Return ``load`` with the steps of ``naming`` that make its tensors."""
    may_miss, may_exceed = ignorable(load.model)
    step_of = {target: step for step in naming.steps for target in step.targets}
    origins: dict[str, tuple[NamingStep, str]] = {}
    twins: list[tuple[str, str]] = []
    missing: list[str] = []
    unfit: dict[str, list[str]] = {"of another shape": [], "of another kind of number": []}
    for spec in (spec for spec in load.skeleton.unique if spec.persistent):
        names = load.skeleton.names_of(spec.name)
        optional = may_miss is not None and any(may_miss.search(name) for name in names)
        present = [name for name in names if name in step_of]
        if present:
            origins[spec.name] = (step_of[present[0]], present[0])
            # Where a converter made one of them there is none to compare.
            sources = [step_of[name].source_names[0] for name in present if step_of[name].converter is None]
            twins += [(sources[0], other) for other in sources[1:]]
            _check_fit(unfit, spec, step=step_of[present[0]], target=present[0], entries=load.reader.entries)
        elif optional and spec.kind == "parameter":
            origins[spec.name] = (NamingStep({spec.name: spec.shape}, ()), spec.name)
        missing += [] if present or optional else [spec.name]
    unexpected = [name for name in naming.unexpected if not (may_exceed and may_exceed.search(name))]
    if not strict:
        _warn(load, "were not used when loading, the model has no place for them", unexpected)
    if partial:
        on_meta = [name for name in missing if _is_meta(load.model, name)]
        kept = [name for name in missing if name not in on_meta]
        _warn(load, "are not in the checkpoint, the model keeps what it has", kept)
        _warn(load, "are not in the checkpoint and stay on the meta device, give them values", on_meta)
    absent = {"missing": [] if partial else missing, "unexpected": unexpected if strict else []}
    misfits = {kind: [repr(name) for name in names] for kind, names in absent.items()}
    _raise_misfits(load, naming, misfits | unfit)
    return replace(load, origins=_by_place(origins, load.reader.entries), twins=tuple(twins))


def _check_fit(
    unfit: Mapping[str, list[str]], spec: TensorSpec, *, step: NamingStep, target: str, entries: Mapping[str, AtRest]
) -> None:
    """Add to ``unfit`` what is wrong with the tensor that ``step`` makes for ``spec``."""
    shape = step.targets[target]
    if shape != spec.shape:
        missing = missing_sibling(step.sources) if step.converter else None
        without = f" (there is no {missing!r})" if missing else ""
        unfit["of another shape"].append(f"{spec.name!r} is {list(shape)} instead of {list(spec.shape)}{without}")
    miscast = [name for name in step.source_names if _kind(entries[name].dtype) != _kind(spec.dtype)]
    if miscast:
        whose = spec.name if step.converter is None else miscast[0]
        problem = f"{whose!r} is {entries[miscast[0]].dtype} where {spec.dtype} belongs"
        unfit["of another kind of number"].append(problem)


def _kind(dtype: str) -> tuple[bool, bool, bool]:
    kind = torch_dtype(dtype)
    return kind.is_floating_point, kind.is_complex, kind is torch.bool


def _is_meta(model: nn.Module, name: str) -> bool:
    tensor: torch.Tensor = getattr(model.get_submodule(parent(name)), name.rpartition(".")[2])
    return tensor.is_meta


def _warn(load: Load, what: str, names: list[str]) -> None:
    """Say ``what`` of the tensors ``names``, if there are any."""
    if names:
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        listed = ", ".join(map(repr, names[:LISTED]))
        _log.warning("%s: tensors %s: %s%s", load.checkpoint.path, what, listed, more)


def _raise_misfits(load: Load, naming: Naming, misfits: Mapping[str, list[str]]) -> None:
    total = sum(map(len, misfits.values()))
    if not total:
        return
    problems, room = [], LISTED
    for kind, tensors in misfits.items():
        if tensors:
            problems.append(f"{len(tensors)} {kind}" + (f": {', '.join(tensors[:room])}" if room else ""))
        room = max(0, room - len(tensors))
    more = f" (and {total - LISTED} more)" if total > LISTED else ""
    raise CheckpointError(
        f"{load.checkpoint.path}: the {naming.source} is not that of {load.skeleton.model_class or 'the model'}: "
        f"{'; '.join(problems)}{more}; do {naming.together} belong together?"
    )


def _by_place(
    origins: Mapping[str, tuple[NamingStep, str]], entries: Mapping[str, AtRest]
) -> dict[str, tuple[NamingStep, str]]:
    """Return ``origins`` in the order in which the first sources lie in the files, so that reads run forward."""

    def place(item: tuple[str, tuple[NamingStep, str]]) -> tuple[str, int]:
        sources = item[1][0].source_names
        return (entries[sources[0]].file.name, entries[sources[0]].begin) if sources else ("", 0)

    return dict(sorted(origins.items(), key=place))


def _adapter_naming(unadapted: Unadapted, entries: Mapping[str, AtRest]) -> Naming:
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


def _part(skeleton: Skeleton, names: Mapping[str, str]) -> Skeleton:
    """Return ``skeleton`` with no other tensors than those of ``names``, called as that says.

    The first of a tied group stays the first.
    """
    return replace(
        skeleton,
        tensors=tuple(replace(spec, name=names[spec.name]) for spec in skeleton.tensors if spec.name in names),
        tied=tuple(tuple(names[name] for name in group) for group in skeleton.tied if set(group) <= names.keys()),
        experts=tuple(
            replace(spec, tensors=tuple(names[name] for name in spec.tensors), module=parent(names[spec.tensors[0]]))
            for spec in skeleton.experts
            if set(spec.tensors) <= names.keys()
        ),
    )
