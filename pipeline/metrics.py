"""The metrics of runs: each is declared once, by the stage that reports it, and whatever shows a run goes by that.

A run writes the table of its stages' metrics into its record, so that who receives the record can read it without
the packages of those stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from offstage.pipeline.decoding import decode
from offstage.pipeline.errors import ConfigError

Unit = str
"""What a number is of, as records have it: ``seconds``, ``bytes``, ``share`` (of 1), ``count`` (whole) or ``number``
(nothing); one of these, or of anything else, a second: ``bytes/s``, ``tokens/s``. ``word`` is that of a text."""
PLAIN_UNITS: tuple[Unit, ...] = ("seconds", "bytes", "share", "count", "number", "word")
A_SECOND = "/s"
KIND_TITLES = {"measured": "measured", "predicted": "predicted", "lower_bound": "lower bound"}
"""What tables call what a metric's ``kind`` says."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its ``name`` in ``run.json`` and the ``unit`` that it is in there.

    Tables have those with a ``title``. ``kind`` says whether it is measured, or predicted before anything ran, or the
    ``lower_bound`` that no measurement can pass; of these two ``of`` names the metric that they are the prediction or
    the lower bound of, where there is one, and they stand beside it. One that is there ``per_device`` goes by
    ``name.DEVICE``. A sweep's table, which has room for little, shows what ``leads``, and the screen of a run leaves
    out what stands ``aside``: the others say it shorter. Records have a null for each that isn't known, but for those
    that are ``optional``: these say nothing of most runs.

    Raises:
        ValueError: the unit is none.
    """

    name: str
    unit: Unit
    title: str = ""
    kind: Literal["measured", "predicted", "lower_bound"] = "measured"
    of: str = ""
    per_device: bool = False
    leads: bool = False
    aside: bool = False
    optional: bool = False

    def __post_init__(self) -> None:
        base = self.unit.removesuffix(A_SECOND)
        if self.unit not in PLAIN_UNITS and (base == self.unit or not base.isalpha()):
            raise ValueError(f": {self.unit!r} is no unit of a metric; give one of {', '.join(PLAIN_UNITS)} or bytes/s")

    @property
    def heading(self) -> str:
        """What its column is called in a table that has measurements, predictions and bounds side by side."""
        return f"{self.title}, {KIND_TITLES[self.kind]}" if self.of else self.title

    def on(self, device: int | str) -> str:
        """Return the name under which a record has that of ``device``."""
        return f"{self.name}.{device}"


@dataclass(frozen=True, slots=True)
class MetricTable:
    """Metrics by their names, in the order in which they are declared."""

    metrics: Mapping[str, Metric]

    @classmethod
    def of(cls, declared: Iterable[Metric]) -> MetricTable:
        """Return the table of what stages have ``declared``; several may share one.

        Raises:
            ConfigError: two of them differ in what they say of one name.
        """
        metrics: dict[str, Metric] = {}
        for metric in declared:
            other = metrics.setdefault(metric.name, metric)
            if other != metric:
                raise ConfigError(
                    f"stages: two of them declare the metric {metric.name!r}, one as {other} and one as {metric}; "
                    "give one of them another name"
                )
        return cls(metrics)

    @classmethod
    def read(cls, stored: object) -> MetricTable:
        """Return the table that a record has as ``stored``; what can't be read of it, or is newer, isn't in it."""
        metrics: dict[str, Metric] = {}
        for name, entry in stored.items() if isinstance(stored, Mapping) else ():
            with suppress(ValueError):
                metrics |= {name: decode(Metric, {**entry, "name": name})} if isinstance(entry, Mapping) else {}
        return cls(metrics)

    def stored(self) -> dict[str, dict[str, Any]]:
        """Return it as a record has it: what it says of each metric, as far as that isn't the default."""
        plain = {entry.name: entry.default for entry in fields(Metric)}
        return {
            name: {key: value for key, value in asdict(metric).items() if key != "name" and value != plain[key]}
            for name, metric in self.metrics.items()
        }

    def joined(self, other: MetricTable) -> MetricTable:
        """Return the metrics of both; of a name that both have, this one's."""
        return MetricTable({**self.metrics, **{n: m for n, m in other.metrics.items() if n not in self.metrics}})

    def find(self, name: str) -> Metric | None:
        """Return the metric of the name that a record has, null where none is declared."""
        metric = self.metrics.get(name)
        if metric is not None:
            return metric
        metric = self.metrics.get(name.partition(".")[0])
        return metric if metric is not None and metric.per_device else None

    def unit(self, name: str, value: float | None = None) -> Unit:
        """Return the unit of ``name``: a metric, or what a device holds (``memory.measured.cpu``).

        A ``value`` of what nobody declares is a number of nothing, and a whole one a count.
        """
        metric = self.find(name)
        if metric is not None:
            return metric.unit
        return "bytes" if name.startswith("memory.") else "count" if isinstance(value, int) else "number"

    def nulls(self) -> dict[str, None]:
        """Return what a record has of metrics before anything is known."""
        every = self.metrics.values()
        return {metric.name: None for metric in every if not metric.optional and not metric.per_device}

    def rows(self) -> Iterator[tuple[Metric, ...]]:
        """Yield the metrics that tables have, each with its prediction and its bound after it.

        Predictions of what isn't in the table come last, and those of each device are left out.
        """
        return self._rows(per_device=False)

    def links(self) -> tuple[Metric, ...]:
        """Return those of each device that tables have, each with its prediction after it."""
        return tuple(metric for row in self._rows(per_device=True) for metric in row)

    def _rows(self, *, per_device: bool) -> Iterator[tuple[Metric, ...]]:
        titled = [one for one in self.metrics.values() if one.title and one.per_device is per_device]
        rows: dict[str, list[Metric]] = {metric.name: [metric] for metric in titled if not metric.of}
        for metric in sorted((one for one in titled if one.of), key=lambda one: one.kind == "lower_bound"):
            rows.setdefault(metric.of, []).append(metric)
        return map(tuple, rows.values())


RUN_METRICS = (Metric("peak_host_bytes", "bytes"), Metric("peak_host_rss_bytes", "bytes"))
"""What the runner reports of every run: the peak of anonymous memory on the host, and that of all resident pages."""
