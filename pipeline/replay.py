"""Two runs held against each other: did the second say the same, and where it didn't, what had changed.

The one question a replay answers with its exit code is whether the outputs are the same: tokens, or what else a stage
left (for a run without any: whether the plan is). The rest explains the answer: plans, the parts of each stage's key,
versions, hardware, speed. ``offstage-report --compare`` shows all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

from offstage.pipeline.cache.fingerprint import Change, changes
from offstage.pipeline.decoding import encode
from offstage.pipeline.run_schema import Run

Record = Mapping[str, Any]
"""A section of a record, or an entry of one, as JSON has it."""
TOKENS = "tokens"
MEMORY = ("budget", "predicted", "measured")
"""The parts of a record's memory that a number can be named of."""
_FROM_BEFORE = ("skeleton", "device_map", "plan", "weights", "placement", "checkpoint")
"""The parts of a key that stand for earlier stages or for the checkpoint: a change there is told where it began."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first of the outputs that differs: of which sequence, at which place, and what it was and is (null: none).

    The place is that of a token; in an output that isn't tokens, the name of what differs.
    """

    sequence: int
    place: int | str
    then: object
    now: object

    def __str__(self) -> str:
        then, now = ("nothing" if value is None else str(value) for value in (self.then, self.now))
        if isinstance(self.place, str):
            return f"output {self.sequence}, {self.place}: was {then}, is {now}"
        return f"sequence {self.sequence}, token {self.place}: was {then}, is {now}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two runs have in common and what not; every list is empty where there is nothing to tell.

    ``kind`` says in a word what the outputs are, and ``differences`` has the first of each that differs; ``moved`` are
    modules that lie elsewhere, ``why`` the parts of the stages' keys that changed, ``environment`` versions and
    hardware; the others are the sections of the records that have these names.
    """

    kind: str
    differences: tuple[Difference, ...]
    moved: tuple[Change, ...]
    why: tuple[Change, ...]
    environment: tuple[Change, ...]
    config: tuple[Change, ...] = ()
    model: tuple[Change, ...] = ()
    memory: tuple[Change, ...] = ()
    metrics: tuple[Change, ...] = ()

    @property
    def difference(self) -> Difference | None:
        """The first of all outputs that differs, None if all are the same."""
        return next(iter(self.differences), None)

    @property
    def same(self) -> bool:
        """Whether the second run came out as the first: its outputs, or without any its plan."""
        return self.difference is None if self.kind else not self.moved


def compare(then: Run, now: Run) -> Comparison:
    """Hold the run ``now`` against the earlier ``then``; a section that the record of one lacks is empty."""
    outputs, later = ([output.whole for output in run.outputs] for run in (then, now))
    memories = ((part, getattr(then.memory, part), getattr(now.memory, part)) for part in MEMORY)
    return Comparison(
        kind=kind_of([*outputs, *later]),
        differences=tuple(differences(outputs, later)),
        moved=tuple(_moved(then.device_map or {}, now.device_map or {})),
        why=tuple(_changed_inputs(then, now)),
        environment=tuple(_other_environment(then, now)),
        config=tuple(changes(then.config, now.config)),
        model=tuple(changes(encode(then.model), encode(now.model))),
        memory=tuple(change for part, before, after in memories for change in changes(before, after, part)),
        metrics=tuple(changes(then.metrics, now.metrics)),
    )


def _other_environment(then: Run, now: Run) -> Iterator[Change]:
    """Yield what differs in machine and versions: of other packages those alone that both runs imported."""
    yield from changes(then.environment, now.environment)
    before, after = then.packages or {}, now.packages or {}
    both = sorted((before.keys() & after.keys()) - then.environment.keys())
    yield from changes({name: before[name] for name in both}, {name: after[name] for name in both})


def kind_of(outputs: Sequence[Record]) -> str:
    """Return what ``outputs`` are in a word, empty where there are none."""
    if not outputs:
        return ""
    return TOKENS if any("token_ids" in output for output in outputs) else "outputs"


def differences(then: Sequence[Record], now: Sequence[Record]) -> Iterator[Difference]:
    """Yield the first token that differs of each of two runs' outputs, then where one run has more of them.

    Outputs that aren't tokens are compared by all that the record has of them.
    """
    nothing: Record = {}
    count = 0
    for place, (old, new) in enumerate(zip_longest(then, now, fillvalue=nothing)):
        differing = _tokens(place, old, new) if kind_of([old, new]) == TOKENS else _parts(place, old, new)
        for first in islice(differing, 1):
            count += 1
            yield first
    if not count and len(then) != len(now):
        yield Difference(min(len(then), len(now)), 0, None, None)


def first_difference(then: Sequence[Record], now: Sequence[Record]) -> Difference | None:
    """Return the first token that differs between two runs' outputs, None if all are the same."""
    return next(differences(then, now), None)


def _tokens(sequence: int, old: Record, new: Record) -> Iterator[Difference]:
    pairs = zip_longest(old.get("token_ids") or (), new.get("token_ids") or ())
    return (Difference(sequence, place, was, now_is) for place, (was, now_is) in enumerate(pairs) if was != now_is)


def _parts(sequence: int, old: Record, new: Record) -> Iterator[Difference]:
    name = str(new.get("name", old.get("name", "")))
    for change in changes(old, new):
        yield Difference(sequence, f"{name} {change.place}".strip(), change.then, change.now)


def _moved(then: Record, now: Record) -> Iterator[Change]:
    """Yield what lies elsewhere under the map ``now`` than under ``then``, which may name parts of other sizes.

    An entry speaks for all that is below it and has none of its own; one without a name for the whole model.
    """
    for name in dict.fromkeys((*then, *now)):
        was, now_is = _home(name, then), _home(name, now)
        in_both = was is not None and now_is is not None
        if was != now_is and (in_both or not _is_split(name, now if now_is is None else then)):
            yield Change(name or "the model", was, now_is)


def _home(name: str, device_map: Record) -> object:
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map.get(name)


def _is_split(name: str, device_map: Record) -> bool:
    """Whether ``device_map`` names parts of ``name`` instead: where these lie is told of each."""
    return any(not name or other.startswith(f"{name}.") for other in device_map)


def _changed_inputs(then: Run, now: Run) -> Iterator[Change]:
    """Yield what changed in the keys of the stages, each change where it began."""
    before = {stage.name: stage.inputs or {} for stage in then.stages}
    for stage in now.stages:
        old, new = before.get(stage.name, {}), stage.inputs or {}
        own = [part for part in dict.fromkeys((*old, *new)) if part not in _FROM_BEFORE]
        for part in own if old else ():
            yield from changes(old.get(part), new.get(part), f"{stage.name}.{part}")
