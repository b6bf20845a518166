"""Two runs held against each other: did the second say the same, and where it didn't, what had changed.

The one question a replay answers with its exit code is whether the tokens are the same (for a run without any: whether
the plan is). The rest explains the answer: plans, the parts of each stage's key, versions, hardware, speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from pipeline.cache.outline import Change, changes

Record = Mapping[str, Any]
_SPEEDS = ("load_seconds", "prefill_seconds", "decode_seconds_per_token")
_FROM_BEFORE = ("skeleton", "device_map", "plan", "weights", "placement", "checkpoint")
"""The parts of a key that stand for earlier stages or for the checkpoint: a change there is told where it began."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token that differs: of which sequence, at which place, and what it was and is (null: none there)."""

    sequence: int
    place: int
    then: int | None
    now: int | None

    def __str__(self) -> str:
        then, now = ("nothing" if token is None else str(token) for token in (self.then, self.now))
        return f"sequence {self.sequence}, token {self.place}: was {then}, is {now}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two runs have in common and what not; every list is empty where there is nothing to tell.

    ``tokens`` is the first difference, ``moved`` the modules that lie elsewhere, ``why`` the parts of the stages' keys
    that changed, ``environment`` versions and hardware, ``speed`` seconds then and now.
    """

    has_tokens: bool
    tokens: Difference | None
    moved: tuple[Change, ...]
    why: tuple[Change, ...]
    environment: tuple[Change, ...]
    speed: tuple[Change, ...]

    @property
    def same(self) -> bool:
        """Whether the second run came out as the first: its tokens, or without any its plan."""
        return self.tokens is None if self.has_tokens else not self.moved


def compare(then: Record, now: Record) -> Comparison:
    """Hold the record ``now`` against the earlier ``then``."""
    return Comparison(
        has_tokens=bool(then["outputs"] or now["outputs"]),
        tokens=first_difference(then["outputs"], now["outputs"]),
        moved=tuple(changes(then.get("device_map") or {}, now.get("device_map") or {})),
        why=tuple(_changed_inputs(then, now)),
        environment=tuple(changes(then["environment"], now["environment"])),
        speed=tuple(Change(name, then["metrics"].get(name), now["metrics"].get(name)) for name in _SPEEDS),
    )


def first_difference(then: Sequence[Record], now: Sequence[Record]) -> Difference | None:
    """Return the first token that differs between two runs' ``outputs``, None if all are the same."""
    for sequence, (old, new) in enumerate(zip_longest(then, now, fillvalue={"token_ids": ()})):
        for place, (was, now_is) in enumerate(zip_longest(old["token_ids"], new["token_ids"])):
            if was != now_is:
                return Difference(sequence, place, was, now_is)
    if len(then) != len(now):
        return Difference(min(len(then), len(now)), 0, None, None)
    return None


def _changed_inputs(then: Record, now: Record) -> Iterator[Change]:
    """Yield what changed in the keys of the stages, each change where it began."""
    before = {stage["name"]: stage.get("inputs") or {} for stage in then["stages"]}
    for stage in now["stages"]:
        old, new = before.get(stage["name"], {}), stage.get("inputs") or {}
        own = [name for name in dict.fromkeys((*old, *new)) if name not in _FROM_BEFORE]
        for name in own if old else ():
            yield from changes(old.get(name), new.get(name), f"{stage['name']}.{name}")
