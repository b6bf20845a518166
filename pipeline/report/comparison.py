"""What changed between two runs: config, environment, plan, memory, speed and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offstage.pipeline.report.differences import flatten, spread
from offstage.pipeline.report.placements import in_tier_order, read_layers
from offstage.pipeline.report.quantities import MISSING, tell, tell_figure
from offstage.pipeline.report.records import Answer, Number, Run
from offstage.pipeline.report.speed import BOUND, PREDICTED_BOUND

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


def compare(before: Run, after: Run) -> RunComparison:
    """Return what changed from ``before`` to ``after``."""
    sections = (
        _texts(
            "Status",
            {"status": before.status, "reason": before.reason},
            {"status": after.status, "reason": after.reason},
        ),
        _texts("Config", flatten(before.config), flatten(after.config)),
        _texts("Environment", flatten(before.environment), flatten(after.environment)),
        _texts("Model", _model(before), _model(after)),
        _plan(before, after),
        _memory(before, after),
        _speed(before, after),
        Section("Tokens", (), tuple(compare_answers(before.answers, after.answers))),
    )
    return RunComparison(before.folder, after.folder, sections)


def compare_answers(before: Sequence[Answer], after: Sequence[Answer]) -> list[str]:
    """Return in words whether the new tokens are the same, and where not, the first that differs of each prompt."""
    if not before or not after:
        without = " nor ".join(name for name, answers in (("A", before), ("B", after)) if not answers)
        return [f"Neither {without} has outputs." if " nor " in without else f"{without} has no outputs."]
    lines = [f"A has {len(before)} answers, B has {len(after)}."] if len(before) != len(after) else []
    for index, (one, other) in enumerate(zip(before, after, strict=False)):
        lines += [f"Prompt {index}: {fault}" for fault in _answer_faults(one, other)]
    kind = "tokens" if any(answer.token_ids for answer in (*before, *after)) else "outputs"
    return lines or [f"The same {kind}."]


def _answer_faults(one: Answer, other: Answer) -> list[str]:
    faults = ["the prompts differ."] if one.prompt != other.prompt else []
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    place = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    if place is not None:
        a, b = one.token_ids[place], other.token_ids[place]
        faults.append(f"token {place} is the first that differs, {a} in A and {b} in B.")
    elif not one.token_ids and not other.token_ids and one.result != other.result:
        faults.append(f"{one.text} in A and {other.text} in B.")
    elif len(one.token_ids) != len(other.token_ids):
        faults.append(f"A has {len(one.token_ids)} tokens and B {len(other.token_ids)}; those in both are the same.")
    return faults


def _texts(title: str, before: dict[str, str], after: dict[str, str]) -> Section:
    changes = []
    for entry in spread({"A": before, "B": after}):
        if entry.differs:
            (one, _), (other, _) = entry.values
            changes.append(ChangedValue(entry.key, one or MISSING, other or MISSING))
    return Section(title, tuple(changes), () if changes else (_SAME,))


def _model(run: Run) -> dict[str, str]:
    """Return what was loaded: its class, parameters by dtype, and bytes."""
    counts = {f"{dtype} parameters": f"{count:,}" for dtype, count in run.model.parameters.items() if count is not None}
    known = {"class": run.model.class_name, "bytes": tell(run.model.bytes, "bytes") if run.model.bytes else ""}
    return {**counts, **{name: told for name, told in known.items() if told}}


def _plan(before: Run, after: Run) -> Section:
    """Return the layers that lie elsewhere."""
    plans = [read_layers(run) for run in (before, after)]
    gone = [name for name, layers in zip("AB", plans, strict=True) if not layers]
    if gone:
        return Section("Plan", (), (f"The plan of {' and '.join(gone)} is not there: pruned, or never made.",))
    old, new = ({layer.name: " and ".join(layer.devices) for layer in layers} for layers in plans)
    section = _texts("Plan", old, new)
    if not section.changes:
        return section
    return Section("Plan", section.changes, (f"{len(section.changes)} of {len(old | new)} layers lie elsewhere.",))


def _memory(before: Run, after: Run) -> Section:
    changes = []
    for title, held in before.memory.items():
        now = after.memory[title]
        for device in in_tier_order([*held, *now]):
            changes += _change(f"{title} {device}", held.get(device), now.get(device), figure="bytes")
    return Section("Memory", tuple(changes), () if changes else (_SAME,), numeric=True)


def _speed(before: Run, after: Run) -> Section:
    changes = []
    for name in dict.fromkeys([*before.metrics, *after.metrics]):
        changes += _change(name, before.metric(name), after.metric(name), figure=name)
    for title, name in (("bound by", BOUND), ("predicted bound", PREDICTED_BOUND)):
        one, other = (run.words.get(name, MISSING) for run in (before, after))
        changes += [ChangedValue(title, one, other)] if one != other else []
    return Section("Speed", tuple(changes), () if changes else (_SAME,), numeric=True)


def _change(key: str, one: Number | None, other: Number | None, *, figure: str) -> list[ChangedValue]:
    """Return what changed under ``key``, in the unit that the name of its ``figure`` says."""
    if one == other:
        return []
    ratio = f"{other / one:.2f}" if one and other is not None else MISSING
    return [ChangedValue(key, tell_figure(figure, one), tell_figure(figure, other), ratio)]
