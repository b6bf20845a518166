"""What packed weights came to beside unpacked ones: the table, what the first run pays, and the break-even."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offstage.stages.units import parse_size

LOSSLESS = "lossless"
FULL = "full"
BASE, PACKED, THEIRS = "unpacked", "packed", "accelerate"
FIGURES = {
    "seconds": ("s a token", "predicted", 1.0, "{:.3f}"),
    "streamed": ("MB a token", "predicted_streamed", 1e6, "{:,.1f}"),
    "peak": ("MB peak", "predicted_peak", 1e6, "{:,.0f}"),
}
"""What is predicted, by its name in a side: its title, the name of its prediction, its unit, how it is written."""
ALLOWED = 0.1
"""By how much a prediction may be off."""


@dataclass(frozen=True, slots=True)
class StoragePoint:
    """Medians at one rate of the storage in bytes a second: seconds a token of each side, and those predicted."""

    rate: float
    seconds: Mapping[str, float]
    predicted: Mapping[str, float]


def lines(by_rate: Mapping[str, Any], kind: str) -> Iterator[str]:
    """Yield the lines of the table, and what follows from it."""
    titles = "".join(f"{title:>12}{'predicted':>11}{'off':>8}" for title, *_ in FIGURES.values())
    yield f"{'storage':<9}{'side':<18}{titles}  times"
    for name, entry in by_rate.items():
        yield from _rows(name, entry["rounds"])
    for name, entry in by_rate.items():
        yield f"{name}: raw direct reads {raw_of(entry['rounds']) / 1e6:,.0f} MB/s; {_answers(entry['rounds'])}"
        if entry.get("first"):
            yield from _first(name, entry)
    yield _verdict(by_rate)
    if kind == LOSSLESS:
        yield from _break_evens(points(by_rate))
        for entry in by_rate.values():
            yield from _by_themselves(entry)


def median_of(rounds: Sequence[Mapping[str, Any]], side: str, figure: str) -> float | None:
    """Return the median of a figure over the rounds that ``side`` lived through; null where it lived through none."""
    lived = [one["sides"][side] for one in rounds if one["sides"][side]["seconds"]]
    values = [each[figure] for each in lived if each.get(figure) is not None]
    return statistics.median(values) if values else None


def raw_of(rounds: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean of raw direct reads around the ``rounds``, in bytes a second."""
    return statistics.mean(statistics.mean(one["raw"]) for one in rounds)


def points(by_rate: Mapping[str, Any]) -> list[StoragePoint]:
    """Return what both sides came to, by the storage's rate, slowest first; a rate at which one has none is out."""
    made = []
    for entry in by_rate.values():
        rounds = entry["rounds"]
        both = {
            figure: {side: median_of(rounds, side, figure) for side in (BASE, PACKED)}
            for figure in ("seconds", "predicted")
        }
        if all(value for each in both.values() for value in each.values()):
            seconds, predicted = ({side: float(value or 0) for side, value in each.items()} for each in both.values())
            made.append(StoragePoint(entry["rate"] or raw_of(rounds), seconds, predicted))
    return sorted(made, key=lambda point: point.rate)


def break_even(gains: Mapping[float, float]) -> float | None:
    """Return the rate at which ``gains``, how many times as fast packed is by the storage's rate, come down to 1.

    Between two rates the logarithms lie on a line. Null where they stay on one side of it.
    """
    rates = sorted(gains)
    for slow, fast in itertools.pairwise(rates):
        above, below = math.log(gains[slow]), math.log(gains[fast])
        if above >= 0 > below:
            share = above / (above - below)
            return math.exp(math.log(slow) + share * (math.log(fast) - math.log(slow)))
    return None


def gains_of(storage_points: Sequence[StoragePoint]) -> tuple[dict[float, float], dict[float, float]]:
    """Return how many times as fast packed is at each rate: predicted, and measured."""
    predicted = {point.rate: point.predicted[BASE] / point.predicted[PACKED] for point in storage_points}
    return predicted, {point.rate: point.seconds[BASE] / point.seconds[PACKED] for point in storage_points}


def _rows(name: str, rounds: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    base = median_of(rounds, BASE, "seconds")
    for side in rounds[0]["sides"]:
        seconds = median_of(rounds, side, "seconds")
        if seconds is None:
            yield f"{name:<9}{side:<18}no figure: {rounds[0]['sides'][side]['failed']}"
            continue
        cells = "".join(_cells(rounds, side, figure) for figure in FIGURES)
        yield f"{name:<9}{side:<18}{cells}  {f'{base / seconds:.2f}' if base else '-'}"


def _cells(rounds: Sequence[Mapping[str, Any]], side: str, figure: str) -> str:
    """Return a figure, what was predicted of it, and by how much that is off."""
    _, prediction, unit, shape = FIGURES[figure]
    measured, predicted = (median_of(rounds, side, each) for each in (figure, prediction))
    off = f"{predicted / measured - 1:+.1%}" if measured and predicted is not None else "-"
    numbers = (shape.format(value / unit) if value is not None else "-" for value in (measured, predicted))
    return "{:>12}{:>11}{:>8}".format(*numbers, off)


def _answers(rounds: Sequence[Mapping[str, Any]]) -> str:
    said = {tuple(side["tokens"]) for one in rounds for side in one["sides"].values() if side["seconds"]}
    return "all gave the same tokens" if len(said) < 2 else f"THE SIDES GAVE {len(said)} DIFFERENT ANSWERS"


def _first(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the run took that packed, beside later ones, and after how many tokens that is made good."""
    first, rounds = entry["first"], entry["rounds"]
    if not first["seconds"]:
        yield f"{name}: the first run has no figure: {first['failed']}"
        return
    share = first["packed"] / first["rested"]
    yield f"{name}: packed {first['rested'] / 1e6:,.0f} MB to {first['packed'] / 1e6:,.0f} ({share:.3f})"
    later, base, packed = (
        median_of(rounds, side, figure) for side, figure in ((PACKED, "wall"), (BASE, "seconds"), (PACKED, "seconds"))
    )
    if not later or not base or not packed:
        return
    paid = first["wall"] - later
    speed = f", {first['rested'] / paid / 1e6:,.0f} MB/s of weights" if paid > 0 else ""
    good = f"made good after {math.ceil(paid / (base - packed)):,} tokens" if base > packed else "never made good"
    yield f"{name}: the first run took {first['wall']:.1f} s, later ones {later:.1f} s: {paid:.1f} s{speed}; {good}"


def _verdict(by_rate: Mapping[str, Any]) -> str:
    """Return by how much predictions are off at most, and whether that is within what is allowed."""
    worst = []
    for figure, (_, prediction, *_) in FIGURES.items():
        offs = [0.0]
        for entry in by_rate.values():
            for side in (BASE, PACKED):
                measured, predicted = (median_of(entry["rounds"], side, each) for each in (figure, prediction))
                if measured and predicted is not None:
                    offs.append(abs(predicted / measured - 1))
        worst.append(f"{figure} {max(offs):.1%}{'' if max(offs) <= ALLOWED else ' (TOO MUCH)'}")
    return f"predictions are off by at most: {', '.join(worst)}"


def _break_evens(storage_points: Sequence[StoragePoint]) -> Iterator[str]:
    for word, gains in zip(("predicted", "measured"), gains_of(storage_points), strict=True):
        place = break_even(gains)
        if place is not None:
            yield f"packing pays up to {place / 1e6:,.0f} MB/s as {word}"
        elif gains:
            least, most = min(gains.values()), max(gains.values())
            verb = "pays" if least >= 1 else "doesn't pay" if most < 1 else "pays now and then"
            yield f"packing {verb} at each rate as {word}: {least:.2f} to {most:.2f} times as fast"


def _by_themselves(entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield how fast packing and unpacking are by themselves, and what plans predict of other storage."""
    if "speeds" in entry:
        packing, unpacking, share = (entry["speeds"][name] for name in ("packing", "unpacking", "share"))
        yield f"weights are packed at {packing / 1e9:.2f} GB/s, to {share:.3f}, and unpacked at {unpacking / 1e9:.2f}"
    if "forecasts" in entry:
        gains = {parse_size(rate): base / packed for rate, (base, packed) in entry["forecasts"].items()}
        speedups = ", ".join(f"{gains[parse_size(rate)]:.2f} at {rate}" for rate in entry["forecasts"])
        place = break_even(gains)
        verdict = f"packing pays up to {place / 1e6:,.0f} MB/s" if place else "there is no break-even among these"
        yield f"plans for storage of other rates: times as fast {speedups}; {verdict}"
