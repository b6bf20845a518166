"""What changed between two runs, as ``pipeline/replay.py`` finds it, told in words and units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offstage.pipeline.cache.outline import Change
from offstage.pipeline.replay import Comparison, compare
from offstage.pipeline.report.differences import as_text
from offstage.pipeline.report.placements import read_layers
from offstage.pipeline.report.quantities import MISSING, tell_figure
from offstage.pipeline.report.records import Run
from offstage.pipeline.report.speed import BOUND, PREDICTED_BOUND

_SAME = "No change."
_WORDS = {BOUND: "bound by", PREDICTED_BOUND: "predicted bound"}


@dataclass(frozen=True, slots=True)
class ChangedValue:
    """One key, its value in A and in B; ``ratio`` is B over A, empty where they are no numbers."""

    key: str
    before: str
    after: str
    ratio: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """One subject of a comparison: the changes, and what else is to be said in words."""

    title: str
    changes: tuple[ChangedValue, ...]
    notes: tuple[str, ...] = ()
    numeric: bool = False


@dataclass(frozen=True, slots=True)
class RunComparison:
    """What changed from run A, in the folder ``before``, to run B in ``after``."""

    before: Path
    after: Path
    sections: tuple[Section, ...]


def compare_runs(before: Run, after: Run) -> RunComparison:
    """Return what changed from ``before`` to ``after``."""
    runs = (before, after)
    found = compare(*(_record(run) for run in runs))
    status = [(run.status, " ".join(run.reason.split())) for run in runs]
    ended = [
        Change(name, *pair) for name, *pair in zip(("status", "reason"), *status, strict=True) if len(set(pair)) > 1
    ]
    sections = (
        _section("Status", ended),
        _section("Config", found.config),
        _section("Environment", found.environment),
        _section("Model", found.model, tell=_figure),
        _plan(found, before, after),
        _section("Inputs", found.why),
        _section("Memory", found.memory, tell=_bytes, numeric=True),
        _section("Speed", found.metrics, tell=_figure, numeric=True),
        Section("Tokens", (), _outputs(found, before, after)),
    )
    return RunComparison(before.folder, after.folder, sections)


def _record(run: Run) -> Mapping[str, Any]:
    """Return the record of ``run`` with its numbers made sure of, and with the map of the plan that it followed."""
    layers = {layer.name: " and ".join(layer.devices) for layer in read_layers(run)}
    return {
        **run.record,
        "device_map": layers,
        "memory": run.memory,
        "metrics": {**run.metrics, **run.words},
        "model": {"class": run.model.class_name, "parameters": run.model.parameters, "bytes": run.model.bytes},
    }


def _text(_key: str, value: object) -> str:
    return MISSING if value is None or value == "" else as_text(value)


def _figure(key: str, value: object) -> str:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return tell_figure(key, value) if known else _text(key, value)  # type: ignore[arg-type]


def _bytes(_key: str, value: object) -> str:
    return _figure("bytes", value)


def _section(
    title: str, changes: Iterable[Change], *, tell: Callable[[str, object], str] = _text, numeric: bool = False
) -> Section:
    told = tuple(
        ChangedValue(
            _title(change.place, is_memory=tell is _bytes),
            tell(change.place, change.then),
            tell(change.place, change.now),
            _ratio(change) if numeric else "",
        )
        for change in changes
    )
    return Section(title, told, () if told else (_SAME,), numeric)


def _title(place: str, *, is_memory: bool) -> str:
    return place.replace(".", " ", 1) if is_memory else _WORDS.get(place, place)


def _ratio(change: Change) -> str:
    """Return B over A, nothing of words, a dash where one of them is no number or A is nothing."""
    one, other = change.then, change.now
    if isinstance(one, str) or isinstance(other, str):
        return ""
    return f"{other / one:.2f}" if isinstance(one, int | float) and isinstance(other, int | float) and one else MISSING


def _plan(found: Comparison, before: Run, after: Run) -> Section:
    """Return the layers that lie elsewhere."""
    plans = {name: read_layers(run) for name, run in (("A", before), ("B", after))}
    gone = [name for name, layers in plans.items() if not layers]
    if gone:
        return Section("Plan", (), (f"The plan of {' and '.join(gone)} is not there: pruned, or never made.",))
    section = _section("Plan", found.moved)
    if not section.changes:
        return section
    count = len({layer.name for layers in plans.values() for layer in layers})
    return Section("Plan", section.changes, (f"{len(section.changes)} of {count} layers lie elsewhere.",))


def _outputs(found: Comparison, before: Run, after: Run) -> tuple[str, ...]:
    """Return in words whether the outputs are the same, and where not, the first that differs of each."""
    without = " nor ".join(name for name, run in (("A", before), ("B", after)) if not run.answers)
    if without:
        return (f"Neither {without} has outputs." if " nor " in without else f"{without} has no outputs.",)
    lines = [f"A has {len(before.answers)} answers, B has {len(after.answers)}."]
    pairs = enumerate(zip(before.answers, after.answers, strict=False))
    prompts = [f"Prompt {number}: the prompts differ." for number, (one, other) in pairs if one.prompt != other.prompt]
    told = [*lines * (len(before.answers) != len(after.answers)), *prompts, *map(str, found.differences)]
    return tuple(told) or (f"The same {found.kind}.",)
