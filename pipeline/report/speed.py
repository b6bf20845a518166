"""The numbers behind the plots of speed: seconds a token against the budget, and tokens a second against memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from offstage.pipeline.report.differences import ABSENT, Spread
from offstage.pipeline.report.noise import SECONDS, token_times
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.run_schema import Bytes, Number

RATE = "decode_tokens_per_second"
LOWER_BOUND_SECONDS = "lower_bound_seconds_per_token"
PREDICTED_SECONDS = "predicted_seconds_per_token"
PREDICTED_BOTTLENECK = "predicted_bottleneck"
DISK = "disk"
MOST_SERIES = 6
OTHERS = "all others"
_NO_SETTINGS = ("max_memory.", "outputs.")
"""The keys of the config that are what a series is plotted against, or nothing that is measured."""


@dataclass(frozen=True, slots=True)
class Point:
    """One job in a plot; ``x`` in bytes, ``y`` in seconds a token or tokens a second.

    ``least`` and ``largest`` are those of the repeats that ``y`` is the median of, where there are several. What was
    measured by an earlier run is ``cached``; ``contended`` says whether others used the processor meanwhile. ``link``
    is the URL of the job's folder.
    """

    job: str
    x: Number
    y: Number
    least: Number | None = None
    largest: Number | None = None
    cached: bool = False
    contended: bool = False
    link: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """The jobs that differ in nothing but what they are plotted against: measured, predicted, and the lower bound.

    The lower bound is the time in which what a token needs can be moved, were all else free.
    """

    name: str
    measured: tuple[Point, ...]
    predicted: tuple[Point, ...]
    lower_bound: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Front:
    """Memory against speed: every job, and those that no other beats in both."""

    points: tuple[Point, ...]
    best: tuple[Point, ...]


def total(amounts: Bytes) -> Number | None:
    """Return the bytes of all devices but the disk, None where one is unlimited or none is known."""
    values = [count for device, count in amounts.items() if device != DISK]
    counts = [count for count in values if count is not None]
    return sum(counts) if values and len(counts) == len(values) else None


def speed_series(jobs: Sequence[Job], differences: Sequence[Spread]) -> tuple[Series, ...]:
    """Return budget (bytes of weights, all devices but disk) against seconds a token, a series for each other setting.

    Past ``MOST_SERIES`` settings the rest share one series: more colours than that can't be told apart.
    """
    names, groups = _settings(jobs, differences), dict[str, list[Job]]()
    for job in jobs:
        if _points([job], SECONDS):
            groups.setdefault(names[job.name], []).append(job)
    largest = sorted(groups, key=lambda name: -len(groups[name]))[:MOST_SERIES]
    merged: dict[str, list[Job]] = {}
    for name, group in groups.items():
        merged.setdefault(name if name in largest else OTHERS, []).extend(group)
    return tuple(_series(name, group) for name, group in merged.items())


def _settings(jobs: Sequence[Job], differences: Sequence[Spread]) -> dict[str, str]:
    """Return each job's name → the settings that set it apart, but for its budget."""
    words: dict[str, list[str]] = {job.name: [] for job in jobs}
    for entry in differences:
        for name, value in entry.by_job.items() if not f"{entry.key}.".startswith(_NO_SETTINGS) else ():
            words[name].append(f"{entry.key}={value}" if value != ABSENT else f"no {entry.key}")
    return {name: ", ".join(parts) for name, parts in words.items()}


def _series(name: str, jobs: Sequence[Job]) -> Series:
    named = {job.name: job for job in jobs}
    measured = tuple(_with_spread(named[point.job], point) for point in _points(jobs, SECONDS))
    return Series(name, measured, _points(jobs, PREDICTED_SECONDS), _points(jobs, LOWER_BOUND_SECONDS))


def _with_spread(job: Job, point: Point) -> Point:
    """Return ``point`` with how far the repeats of ``job`` lie apart, and where they come from."""
    times, provenance = token_times(job), job.run.provenance
    ends = [*times, point.y]  # a record may say that its figure isn't among its repeats
    spread = (min(ends), max(ends)) if len(times) > 1 else (None, None)
    return replace(
        point, least=spread[0], largest=spread[1], cached=provenance.is_cached, contended=bool(provenance.contended)
    )


def _points(jobs: Sequence[Job], metric: str) -> tuple[Point, ...]:
    """Return the jobs that have a budget and a value of ``metric``, by their budgets."""
    measured = [(job, total(job.run.memory.budget), job.run.metric(metric)) for job in jobs]
    points = [
        Point(job.name, x, y, link=job.link) for job, x, y in measured if x is not None and y is not None and y >= 0
    ]
    return tuple(sorted(points, key=lambda point: point.x))


def pareto(jobs: Sequence[Job]) -> Front:
    """Return the measured peak of all devices (bytes) against tokens a second, and the front of it.

    A job is on the front where no other takes as little memory or less and is as fast or faster, one of them strictly.
    """
    measured = [(job, total(known_bytes(job.run.memory.measured)), job.run.metric(RATE)) for job in jobs]
    points = [
        Point(job.name, x, y, cached=job.run.provenance.is_cached, link=job.link)
        for job, x, y in measured
        if x is not None and y is not None
    ]
    points.sort(key=lambda point: (point.x, -point.y))
    best: list[Point] = []
    for point in points:
        equal = bool(best) and (point.x, point.y) == (best[-1].x, best[-1].y)
        if equal or not best or point.y > best[-1].y:
            best.append(point)
    return Front(tuple(points), tuple(best))


def known_bytes(amounts: Bytes) -> Mapping[str, Number]:
    """Return the devices whose bytes are known."""
    return {device: count for device, count in amounts.items() if count is not None}
