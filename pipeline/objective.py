"""What a search goes by: one number of a run's record, and the limits within which it counts.

A sweep that searches decides on its next jobs by the number that each came to. The keys ``objective`` say which of the
record's numbers that is, so that it can be any: a metric, what a device was allowed or held, and so can its limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from offstage.pipeline.errors import ConfigError, Fault, closest
from offstage.pipeline.installed_stages import installed_metrics, metric_table
from offstage.pipeline.metrics import Unit
from offstage.pipeline.replay import MEMORY
from offstage.pipeline.report.quantities import tell
from offstage.pipeline.run_schema import Run
from offstage.pipeline.typed_config import read

SEARCH_RESULTS = "optimization_results.yaml"
"""The file in a sweep's folder that says what its search came to, by the name that hydra-optuna-sweeper gives it. It
holds JSON, which is YAML too."""


class UnmeasuredError(ConfigError):
    """A metric that runs have, and that one came to no value of: a run of one token has no seconds of decoding."""


@dataclass(frozen=True, slots=True)
class ObjectiveConfig:
    """``metric`` names the number, a metric or ``memory.budget.cpu`` and its like; null: a run comes to none.

    ``at_most`` and ``at_least`` map such names to what they may be.
    """

    metric: str | None = None
    at_most: Mapping[str, float] = field(default_factory=dict)
    at_least: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limit:
    """What a run's ``value`` of the metric ``name``, both in ``unit``, may be: ``limit`` at most, or at least."""

    name: str
    is_most: bool
    limit: float
    value: float
    unit: Unit = "number"

    @property
    def excess(self) -> float:
        """By how much the value is past the limit, as a share of that: 0 or less where it is kept."""
        return (self.value - self.limit) / abs(self.limit) * (1 if self.is_most else -1)


@dataclass(frozen=True, slots=True)
class Objective:
    """What a run came to: the ``value`` of the metric ``name``, in ``unit``, and its limits."""

    name: str
    value: float
    limits: tuple[Limit, ...] = ()
    unit: Unit = "number"

    @property
    def is_within(self) -> bool:
        """Whether every limit is kept."""
        return all(limit.excess <= 0 for limit in self.limits)

    def describe(self) -> str:
        """Return it in words, with its limits."""
        words = [f"{self.name} {tell(self.value, self.unit)}"]
        for limit in self.limits:
            side, amount = "at most" if limit.is_most else "at least", tell(limit.limit, limit.unit)
            words.append(f"{limit.name} {tell(limit.value, limit.unit)} ({side} {amount})")
        return ", ".join(words)


def read_objective(config: Mapping[str, Any]) -> ObjectiveConfig:
    """Return the keys ``objective`` of ``config``; a record from before there were any names no number."""
    return read(ObjectiveConfig, config.get("objective") or {})


def check_objective(config: Mapping[str, Any]) -> Iterable[Fault]:
    """Yield what is wrong with the keys ``objective``, which are of their types, as far as no record is needed."""
    given = read_objective(config)
    if given.metric is not None:
        yield from _misnamed("objective.metric", given.metric)
    for key, limits in (("objective.at_most", given.at_most), ("objective.at_least", given.at_least)):
        if limits and given.metric is None:
            yield Fault(key, "limits, and no metric to search by: name one, objective.metric=decode_seconds_per_token")
        for name, limit in limits.items():
            yield from _misnamed(key, str(name))
            if isinstance(limit, bool) or not isinstance(limit, int | float) or not math.isfinite(limit) or limit == 0:
                yield Fault(f"{key}.{name}", f"{limit!r} is no limit; give a number that isn't 0")


def _misnamed(key: str, name: str) -> Iterable[Fault]:
    """Yield why ``name`` can be none of a record's numbers: those of memory, and the metrics that a stage declares."""
    section, *rest = name.split(".")
    table, is_memory = installed_metrics(), section == "memory" and len(rest) == 2 and rest[0] in MEMORY and rest[1]
    metric = table.find(name)
    if not is_memory and (metric is None or metric.unit == "word"):
        numbers = [one.name for one in table.metrics.values() if one.unit != "word"]
        yield Fault(
            key,
            f"{name!r} names no number of a record{closest(name, numbers)}; give a metric that a stage declares "
            f"(decode_seconds_per_token) or memory.PART.DEVICE, with a part of {', '.join(MEMORY)}",
        )


def objective_of(run: Run) -> Objective | None:
    """Return what ``run`` came to; null where its config names no number.

    Raises:
        UnmeasuredError: the record has the metric that the config names, and no value of it.
        ConfigError: the record has no number of a name that the config gives.
    """
    given, table = read_objective(run.config), metric_table(run)
    if given.metric is None:
        return None
    sides = (("objective.at_most", given.at_most), ("objective.at_least", given.at_least))
    limits = [
        Limit(name, limits is given.at_most, limit, _number(run, key, name), table.unit(name))
        for key, limits in sides
        for name, limit in limits.items()
    ]
    value = _number(run, "objective.metric", given.metric)
    return Objective(given.metric, value, tuple(limits), table.unit(given.metric, value))


def require_numbers(run: Run) -> None:
    """Raise a ``ConfigError`` where the config of a completed ``run`` names a number that no record has.

    One that others have, and this run came to no value of, is no fault.
    """
    with suppress(UnmeasuredError):
        objective_of(run)


def _number(run: Run, key: str, name: str) -> float:
    """Return the number of that name; a ``ConfigError`` about ``key`` where there is none."""
    numbers = _numbers(run)
    if name not in numbers:
        declared = any(table.find(name) for table in (metric_table(run), installed_metrics()))
        raise (UnmeasuredError if declared or name in run.metrics else ConfigError)(
            f"{key}: this run's record has no number {name!r}{closest(name, numbers)}; "
            "the metrics and the memory in its run.json are what can be named"
        )
    return numbers[name]


def _numbers(run: Run) -> dict[str, float]:
    """Return every number of the run's record that can be named."""
    parts = [("", run.metrics), *((f"memory.{part}.", getattr(run.memory, part)) for part in MEMORY)]
    return {
        f"{before}{name}": float(value)
        for before, values in parts
        for name, value in values.items()
        if isinstance(value, int | float)
    }
