"""What differs between jobs, and only that."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from offstage.pipeline.plain_data import leaves
from offstage.pipeline.report.run_folders import Job

ABSENT = "not given"


@dataclass(frozen=True, slots=True)
class Spread:
    """One key and the values that the jobs have for it, each with the names of those jobs."""

    key: str
    values: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def differs(self) -> bool:
        """Whether there is more than one value."""
        return len(self.values) > 1


def flatten(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the leaves of ``tree`` by their dotted keys, as text; an empty mapping has none."""
    return {key: as_text(value) for key, value in leaves(tree) if value != {}}


def as_text(value: Any) -> str:
    """Return ``value`` as one would write it in YAML: a string that looks like something else keeps its quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else _scalar_text(value)


@lru_cache(maxsize=2**14, typed=True)
def _scalar_text(value: Any) -> str:
    """Return one value as text. Thousands of records say the same words, and 1 isn't 1.0, nor true."""
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        return value
    return json.dumps(value)


def spread(maps: Mapping[str, Mapping[str, str]]) -> tuple[Spread, ...]:
    """Return every key of ``maps`` (a job's name → key → value), in the order in which they first stand there."""
    keys = dict.fromkeys(key for flat in maps.values() for key in flat)
    spreads = []
    for key in keys:
        values: dict[str, list[str]] = {}
        for job, flat in maps.items():
            values.setdefault(flat.get(key, ABSENT), []).append(job)
        spreads.append(Spread(key, tuple((value, tuple(jobs)) for value, jobs in values.items())))
    return tuple(spreads)


def config_differences(jobs: Sequence[Job]) -> tuple[Spread, ...]:
    """Return the config keys whose values differ. A run that ended before its config was resolved has no say."""
    maps = {job.name: flatten(job.run.config) for job in jobs if job.run.config}
    return tuple(entry for entry in spread(maps) if entry.differs)


def answers(jobs: Sequence[Job]) -> tuple[tuple[Job, tuple[str, ...]], ...]:
    """Return each different set of results once: the first job that gave it, and the names of all that did."""
    groups: dict[tuple[tuple[str, object], ...], list[Job]] = {}
    for job in jobs:
        if job.run.outputs:
            said = tuple((answer.title, answer.result) for answer in job.run.outputs)
            groups.setdefault(said, []).append(job)
    return tuple((group[0], tuple(job.name for job in group)) for group in groups.values())
