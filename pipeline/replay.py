"""Two runs held against each other: did the second say the same, and where it didn't, what had changed.

The one question a replay answers with its exit code is whether the outputs are the same: tokens, or what else a stage
left (for a run without any: whether the plan is). The rest explains the answer: plans, the parts of each stage's key,
versions, hardware, speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from offstage.pipeline.cache.outline import Change, changes

Record = Mapping[str, Any]
TOKENS = "tokens"
_SPEEDS = ("load_seconds", "prefill_seconds", "decode_seconds_per_token")
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

    ``kind`` says in a word what the outputs are, and ``difference`` is the first of them; ``moved`` are modules that
    lie elsewhere, ``why`` the parts of the stages' keys that changed, ``environment`` versions and hardware, ``speed``
    seconds then and now.
    """

    kind: str
    difference: Difference | None
    moved: tuple[Change, ...]
    why: tuple[Change, ...]
    environment: tuple[Change, ...]
    speed: tuple[Change, ...]

    @property
    def same(self) -> bool:
        """Whether the second run came out as the first: its outputs, or without any its plan."""
        return self.difference is None if self.kind else not self.moved


def compare(then: Record, now: Record) -> Comparison:
    """Hold the record ``now`` against the earlier ``then``."""
    return Comparison(
        kind=kind_of([*then["outputs"], *now["outputs"]]),
        difference=first_difference(then["outputs"], now["outputs"]),
        moved=tuple(_moved(then.get("device_map") or {}, now.get("device_map") or {})),
        why=tuple(_changed_inputs(then, now)),
        environment=tuple(_other_environment(then, now)),
        speed=tuple(Change(name, then["metrics"].get(name), now["metrics"].get(name)) for name in _SPEEDS),
    )


def _other_environment(then: Record, now: Record) -> Iterator[Change]:
    """Yield what differs in machine and versions: of other packages those alone that both runs imported."""
    yield from changes(then["environment"], now["environment"])
    before, after = then.get("packages") or {}, now.get("packages") or {}
    both = sorted((before.keys() & after.keys()) - then["environment"].keys())
    yield from changes({name: before[name] for name in both}, {name: after[name] for name in both})


def kind_of(outputs: Sequence[Record]) -> str:
    """Return what ``outputs`` are in a word, empty where there are none."""
    if not outputs:
        return ""
    return TOKENS if any("token_ids" in output for output in outputs) else "outputs"


def first_difference(then: Sequence[Record], now: Sequence[Record]) -> Difference | None:
    """Return the first token that differs between two runs' ``outputs``, None if all are the same.

    Outputs that aren't tokens are compared by all that the record has of them.
    """
    nothing: Record = {}
    for place, (old, new) in enumerate(zip_longest(then, now, fillvalue=nothing)):
        differences = _tokens(place, old, new) if kind_of([old, new]) == TOKENS else _parts(place, old, new)
        first = next(differences, None)
        if first is not None:
            return first
    if len(then) != len(now):
        return Difference(min(len(then), len(now)), 0, None, None)
    return None


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
        known = was is not None and now_is is not None
        if was != now_is and (known or not _is_split(name, now if now_is is None else then)):
            yield Change(name or "the model", was, now_is)


def _home(name: str, device_map: Record) -> object:
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map.get(name)


def _is_split(name: str, device_map: Record) -> bool:
    """Whether ``device_map`` names parts of ``name`` instead: where these lie is told of each."""
    return any(not name or other.startswith(f"{name}.") for other in device_map)


def _changed_inputs(then: Record, now: Record) -> Iterator[Change]:
    """Yield what changed in the keys of the stages, each change where it began."""
    before = {stage["name"]: stage.get("inputs") or {} for stage in then["stages"]}
    for stage in now["stages"]:
        old, new = before.get(stage["name"], {}), stage.get("inputs") or {}
        own = [name for name in dict.fromkeys((*old, *new)) if name not in _FROM_BEFORE]
        for name in own if old else ():
            yield from changes(old.get(name), new.get(name), f"{stage['name']}.{name}")
