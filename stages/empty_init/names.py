"""From the checkpoint's names to the model's.

Published checkpoints don't always carry the model class's names and layouts. transformers keeps the mapping
from one to the other; its public pieces are used here, in the order in which its own loader uses them, so
that both agree. A rename leaves a tensor where it lies; a merge, split or transpose becomes a step with a
converter. A module that isn't a transformers model carries its names as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.codecs.packed_matrices import BESIDE
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.packed import AtRest
from offstage.stages.empty_init.siblings import missing_sibling, unlike_sibling

_LISTED = "experts"
"""The pattern of what is stacked as it rests."""


@dataclass(frozen=True, slots=True)
class NamingStep:
    """How some of the model's tensors are made from some of the checkpoint's.

    ``targets`` maps the model's names to the shapes that come out; ``sources`` lists (pattern, name in the
    checkpoint) in the order of transformers' ``converter``. Without one it is one tensor under another name, or,
    without sources, a parameter that no checkpoint holds and that the model class itself computes.
    """

    targets: Mapping[str, tuple[int, ...]]
    sources: tuple[tuple[str, str], ...]
    converter: Any = None

    @property
    def source_names(self) -> list[str]:
        """The names of the sources in the checkpoint."""
        return [name for _, name in self.sources]


@dataclass(frozen=True, slots=True)
class Naming:
    """The steps that make the model's tensors, and the checkpoint's names that are part of none.

    ``source`` is what they are names of, and ``together`` what doesn't belong together where they don't fit, in words.
    """

    steps: tuple[NamingStep, ...]
    unexpected: tuple[str, ...]
    source: str = "checkpoint"
    together: str = "config.json and the weights"


def name_tensors(model: nn.Module, entries: Mapping[str, AtRest]) -> Naming:
    """Return how the tensors of ``model`` are made from the checkpoint's ``entries``."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return _converted(model, entries)
    expected = model.state_dict().keys()
    steps = tuple(NamingStep({name: entry.shape}, (("", name),)) for name, entry in entries.items() if name in expected)
    return Naming(steps, tuple(name for name in entries if name not in expected))


def ignorable(model: nn.Module) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
    """Return what the class of ``model`` lets be missing, and unexpected, in a checkpoint; null for nothing.

    The buffers that transformers made non-persistent (rotary tables, position ids) are in old checkpoints
    still.
    """
    unexpected = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        unexpected.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        unexpected.add(r"(^|\.)position_ids$")
    return _any_of(getattr(model, "_keys_to_ignore_on_load_missing", None) or ()), _any_of(unexpected)


def _any_of(patterns: Iterable[str]) -> re.Pattern[str] | None:
    joined = "|".join(f"({pattern})" for pattern in sorted(patterns))
    return re.compile(joined) if joined else None


def _converted(model: Any, entries: Mapping[str, AtRest]) -> Naming:
    """Return the naming of a transformers model, renamed and grouped as its own loader does it."""
    from transformers.core_model_loading import dot_natural_key

    rename, listed = _Renamer(model), _listed(model)
    groups: dict[tuple[str, int], list[tuple[str, str]]] = {}
    unexpected: list[str] = []
    for source in sorted(entries, key=dot_natural_key):
        target, pattern = (listed[source], _LISTED) if source in listed else rename(source)
        if target not in rename.expected:
            unexpected.append(source)
            continue
        groups.setdefault((target, rename.index(pattern)), []).append((pattern or "", source))
    return Naming(tuple(_step(rename, *key, sources, entries) for key, sources in groups.items()), tuple(unexpected))


def _listed(model: nn.Module) -> dict[str, str]:
    """Return what is stacked, one after the other, in tensors of modules that say so themselves, and in which."""
    return {
        source: f"{name}.{attribute}"
        for name, module in model.named_modules()
        for source, attribute in getattr(module, "listed", {}).items()
    }


class _Renamer:
    """Applies transformers' conversion mapping for one model to one name after the other.

    It is an object because some of the mapping's entries remember what they have seen.
    """

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import MergeModulelist, WeightConverter, WeightRenaming

        mapping = get_model_conversion_mapping(model)
        self.model = model
        self.expected: Mapping[str, torch.Tensor] = model.state_dict()
        self._theirs = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self.converters = [*self._theirs, WeightConverter([_LISTED], [_LISTED], [MergeModulelist(dim=0)])]
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self.shapes: dict[object, tuple[int, ...]] = {}
        """What comes of sources that look alike, where a converter makes one tensor and only moves data."""

    def __call__(self, source: str) -> tuple[str, str | None]:
        """Return what ``source`` is called in the model, and the pattern that a converter has for it.

        What belongs to a weight that is used as it rests is called as that weight is.
        """
        target, pattern = self._rename(source)
        end = next((end for end in BESIDE if source.endswith(end)), None)
        if target in self.expected or end is None:
            return target, pattern
        weight, pattern_of_weight = self._rename(source.removesuffix(end))
        return (weight + end, pattern_of_weight) if weight + end in self.expected else (target, pattern)

    def _rename(self, source: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        prefix = self.model.base_model_prefix
        renamed = rename_source_key(source, self._renamings, self._theirs, prefix, self.expected)
        if renamed[0] not in self.expected and source in self.expected:
            renamed = rename_source_key(source, [], [], prefix, self.expected)
        target, pattern = renamed
        return str(target), pattern

    def index(self, pattern: str | None) -> int:
        """Return the place of the converter that ``pattern`` belongs to, -1 for none."""
        matching = (i for i, converter in enumerate(self.converters) if pattern in converter.source_patterns)
        return next(matching, -1)


def _step(
    rename: _Renamer, target: str, index: int, sources: list[tuple[str, str]], entries: Mapping[str, AtRest]
) -> NamingStep:
    if index < 0:
        if len(sources) > 1:
            names = " and ".join(repr(name) for _, name in sources)
            raise CheckpointError(f"{entries[sources[1][1]].file.path}: {names} are both the model's {target!r}")
        return NamingStep({target: entries[sources[0][1]].shape}, tuple(sources))
    converter = deepcopy(rename.converters[index])
    looks = tuple((pattern, entries[name].shape, entries[name].dtype) for pattern, name in sources)
    look = index, tuple(rename.expected[target].shape), looks
    if look in rename.shapes:
        return NamingStep({target: rename.shapes[look]}, tuple(sources), converter)
    rehearsed = deepcopy(converter)
    for pattern, name in sources:
        entry = entries[name]
        empty = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="meta")
        rehearsed.add_tensor(target, name, pattern, empty)
    try:
        shapes = {name: tuple(tensor.shape) for name, tensor in convert(rehearsed, target, rename.model).items()}
    except CheckpointError as error:
        raise _unmade(target, sources, entries, error) from error
    if list(shapes) == [target] and _only_moves(converter):
        rename.shapes[look] = shapes[target]
    return NamingStep(shapes, tuple(sources), converter)


def _only_moves(converter: Any) -> bool:
    """Return whether what ``converter`` makes hangs on the shapes of its sources and of its target alone."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

    return all(type(operation) in (Concatenate, MergeModulelist, Transpose) for operation in converter.operations)


def _unmade(
    target: str, sources: list[tuple[str, str]], entries: Mapping[str, AtRest], error: CheckpointError
) -> CheckpointError:
    """Return an error that names the one of ``sources`` by which ``target`` can't be made; else says ``error``."""
    missing, unlike, path = missing_sibling(sources), unlike_sibling(sources, entries), entries[sources[0][1]].file.path
    wrong = unlike or (f"{missing!r} is missing" if missing else None)
    said = str(error) if wrong is None else f"{wrong}, so {target!r} can't be made"
    return CheckpointError(f"{path.parent}: {said}; get the checkpoint again")


def convert(converter: Any, target: str, model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that ``converter`` makes for the layer named ``target`` from what it has collected."""
    try:
        converted = converter.convert(target, model=model, config=model.config)
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"tensor {target!r} can't be made from the checkpoint's tensors: {reason}") from error
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}
