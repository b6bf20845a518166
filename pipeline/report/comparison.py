"""What changed between two runs, as ``pipeline/replay.py`` finds it, told in words and units."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offstage.pipeline.cache.fingerprint import Change
from offstage.pipeline.installed_stages import metric_table
from offstage.pipeline.metrics import Unit
from offstage.pipeline.replay import Comparison, compare
from offstage.pipeline.report.differences import as_text
from offstage.pipeline.report.quantities import MISSING, tell
from offstage.pipeline.run_schema import Run

_SAME = "No change."


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
    runs, table = (before, after), metric_table(after).joined(metric_table(before))
    comparison = compare(before, after)
    status = [(run.status, " ".join(run.reason.split())) for run in runs]
    ended = [
        Change(name, *pair) for name, *pair in zip(("status", "reason"), *status, strict=True) if len(set(pair)) > 1
    ]
    memory = [replace(change, place=change.place.replace(".", " ", 1)) for change in comparison.memory]
    sections = (
        _section("Status", ended),
        _section("Config", comparison.config),
        _section("Environment", comparison.environment),
        _section("Model", comparison.model, unit=lambda key, _: "bytes" if key == "bytes" else "count"),
        _section("Plan", comparison.moved),
        _section("Inputs", comparison.why),
        _section("Memory", memory, unit=lambda place, _: table.unit(f"memory.{place}")),
        _section("Speed", comparison.metrics, unit=table.unit),
        Section("Tokens", (), _outputs(comparison, before, after)),
    )
    return RunComparison(before.folder, after.folder, sections)


def _told(place: str, value: object, unit: Callable[[str, Any], Unit] | None) -> str:
    if unit and isinstance(value, int | float) and not isinstance(value, bool):
        return tell(value, unit(place, value))
    return MISSING if value is None or value == "" else as_text(value)


def _section(title: str, changes: Iterable[Change], *, unit: Callable[[str, Any], Unit] | None = None) -> Section:
    """Return ``changes`` as they are written, or in the ``unit`` of a name and its value and with their ratio."""
    rows = tuple(
        ChangedValue(
            change.place,
            _told(change.place, change.then, unit),
            _told(change.place, change.now, unit),
            _ratio(change) if unit else "",
        )
        for change in changes
    )
    return Section(title, rows, () if rows else (_SAME,), unit is not None)


def _ratio(change: Change) -> str:
    """Return B over A, nothing of words, a dash where one of them is no number or A is nothing."""
    one, other = change.then, change.now
    if isinstance(one, str) or isinstance(other, str):
        return ""
    return f"{other / one:.2f}" if isinstance(one, int | float) and isinstance(other, int | float) and one else MISSING


def _outputs(comparison: Comparison, before: Run, after: Run) -> tuple[str, ...]:
    """Return in words whether the outputs are the same, and where not, the first that differs of each."""
    without = " nor ".join(name for name, run in (("A", before), ("B", after)) if not run.outputs)
    if without:
        return (f"Neither {without} has outputs." if " nor " in without else f"{without} has no outputs.",)
    lines = [f"A has {len(before.outputs)} answers, B has {len(after.outputs)}."]
    pairs = enumerate(zip(before.outputs, after.outputs, strict=False))
    prompts = [f"Prompt {number}: the prompts differ." for number, (one, other) in pairs if one.title != other.title]
    sentences = [*lines * (len(before.outputs) != len(after.outputs)), *prompts, *map(str, comparison.differences)]
    return tuple(sentences) or (f"The same {comparison.kind}.",)
