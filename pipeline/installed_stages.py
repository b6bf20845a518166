"""The stages that are installed: the entry points of the group ``offstage.stages``, whichever package has them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields
from functools import cache, lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.metrics import RUN_METRICS, MetricTable
from offstage.pipeline.run_schema import Run

GROUP = "offstage.stages"
OWN_PACKAGE = "offstage-pipeline"


@cache
def installed_stages() -> dict[str, EntryPoint]:
    """Return the entry points of the installed stages by name; none is imported."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def is_own_stage(name: str) -> bool:
    """Return whether the installed stage ``name`` is one of offstage's, and not of another package."""
    return _package(installed_stages()[name]) == OWN_PACKAGE


def stage_class(name: str) -> Any:
    """Return the class of the installed stage ``name``; a ``ConfigError`` where its module doesn't load."""
    entry = installed_stages()[name]
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"stages: {name!r} of {_package(entry)} can't be loaded: {error}; mend or uninstall it"
        ) from error


def work_of(name: str) -> str:
    """Return the stage ``name`` with what it does, as far as it says that: for who waits for it."""
    doing = getattr(stage_class(name), "doing", "")
    return f"{name}: {doing}" if doing else name


def any_measures(names: Iterable[str]) -> bool:
    """Return whether one of the stages is measured as the keys ``measure`` of the config say."""
    return any(getattr(stage_class(name), "measures", False) for name in names)


def declared_metrics(names: Iterable[str]) -> MetricTable:
    """Return the table of the metrics that the stages ``names`` declare, and of those of every run.

    Raises ``ConfigError`` where two of them declare one name otherwise.
    """
    stages = [getattr(stage_class(name), "metrics", ()) for name in names]
    return MetricTable.of([*(metric for metrics in stages for metric in metrics), *RUN_METRICS])


@cache
def installed_metrics() -> MetricTable:
    """Return the table of all metrics that installed stages declare: where two differ, offstage's own counts.

    A stage that doesn't load, or contradicts itself, has none.
    """
    table = MetricTable({})
    for name in sorted(installed_stages(), key=is_own_stage, reverse=True):
        with suppress(ConfigError):
            table = table.joined(declared_metrics([name]))
    return table


def metric_table(run: Run) -> MetricTable:
    """Return the metrics that ``run`` has a table of; of a record from before there were any all that are known."""
    return _table(json.dumps(run.metric_table)) if run.metric_table else installed_metrics()


@lru_cache
def _table(stored: str) -> MetricTable:
    return MetricTable.read(json.loads(stored))


def stage_configs() -> dict[str, type[Any]]:
    """Return the typed config of every installed stage, by the stage's name.

    Raises ``ConfigError`` where two stages have one key.
    """
    configs = {name: stage_class(name).config_class for name in installed_stages()}
    owners: dict[str, str] = {}
    for name, kind in configs.items():
        for entry in fields(kind):
            other = owners.setdefault(entry.name, name)
            if other != name:
                packages = " and ".join(_package(installed_stages()[stage]) for stage in (other, name))
                raise ConfigError(
                    f"{entry.name}: the stages {other!r} and {name!r} both have this key; uninstall one of {packages}"
                )
    return configs


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
