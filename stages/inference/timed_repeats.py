"""How the time of a model's work went, repeat by repeat, and the metrics that are made of several.

A repeat is one pass of a whole generation, scoring or forward over the placed model. The first is stored with what came
out; those that a later run asks for have artifacts of their own in the cache, so that none is taken twice.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what forwards cost comes with torch, which a run that is served from the cache does without
    from offstage.stages.inference.cost import Metrics

PERCENTILES = (50, 90, 99)
_MOST_TIMES = 1000
"""Of more times than that so many are kept, evenly from their order: percentiles stay what they are."""
_BANDWIDTH = "storage_bandwidth_bytes_per_second"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRepeat:
    """One pass: when it was ``measured``, how many ``passes_before`` it the model had made where it is placed.

    ``metrics`` are the run record's, of this pass. ``first_token_seconds`` has an entry a batch, ``token_seconds`` one
    for each token after that; where no tokens are made they have none. ``processor`` says who had the processor
    meanwhile, ``machine`` how the machine was, ``peaks`` what each device had held by then, in bytes. One that isn't
    whole went on where a run had been killed. ``is_earlier`` says whether another run measured it.
    """

    measured: str
    passes_before: int
    is_whole: bool
    metrics: Metrics
    first_token_seconds: Sequence[float]
    token_seconds: Sequence[float]
    processor: Mapping[str, Any]
    machine: Mapping[str, Any]
    peaks: Mapping[str, int]
    is_earlier: bool = False

    def stored(self) -> dict[str, Any]:
        """Return it as the cache holds it."""
        fields = {name: value for name, value in asdict(self).items() if name != "is_earlier"}
        return fields | {name: _bounded(fields[name]) for name in ("first_token_seconds", "token_seconds")}

    def as_record(self, *, counts: bool) -> dict[str, Any]:
        """Return it as the record holds it: whether it ``counts`` for the run's metrics is said there too."""
        content = {**self.stored(), "earlier": self.is_earlier, "counts": counts}
        content["token_seconds_percentiles"] = percentiles(self.token_seconds)
        return {name: value for name, value in content.items() if name != "peaks"}


def _bounded(times: Sequence[float]) -> list[float]:
    """Return ``times`` to the microsecond; of more than ``_MOST_TIMES`` so many, from the least to the largest."""
    if len(times) <= _MOST_TIMES:
        return [round(seconds, 6) for seconds in times]
    ordered, last = sorted(times), _MOST_TIMES - 1
    return [round(ordered[place * (len(times) - 1) // last], 6) for place in range(_MOST_TIMES)]


def read_repeat(stored: Mapping[str, Any], *, is_earlier: bool) -> TimedRepeat:
    """Return the repeat that the cache holds as ``stored``."""
    names = {entry.name for entry in fields(TimedRepeat)}
    return TimedRepeat(**{name: value for name, value in stored.items() if name in names}, is_earlier=is_earlier)


def combined_metrics(repeats: Sequence[TimedRepeat], *, seconds: str) -> Metrics:
    """Return the run record's metrics of ``repeats``: of each the median, and percentiles over the tokens of all.

    What set the speed is told of the repeat in the middle, by the metric ``seconds``.
    """
    names = dict.fromkeys(name for repeat in repeats for name in repeat.metrics)
    middle = sorted(repeats, key=lambda repeat: repeat.metrics.get(seconds) or 0)[(len(repeats) - 1) // 2]
    metrics: Metrics = {name: _median(repeat.metrics.get(name) for repeat in repeats) for name in names}
    metrics |= {name: value for name, value in middle.metrics.items() if isinstance(value, str)}
    metrics[_BANDWIDTH] = _median(repeat.machine.get("storage_bytes_per_second") for repeat in repeats)
    metrics |= dict(_percentile_metrics(repeats))
    metrics["repeats"] = len(repeats)
    metrics["contended_repeats"] = sum(bool(repeat.processor.get("contended")) for repeat in repeats)
    return metrics


def _percentile_metrics(repeats: Sequence[TimedRepeat]) -> Iterator[tuple[str, float]]:
    firsts = [seconds for repeat in repeats for seconds in repeat.first_token_seconds]
    tokens = [seconds for repeat in repeats for seconds in repeat.token_seconds]
    for name, times in (("time_to_first_token_seconds", firsts), ("time_between_tokens_seconds", tokens)):
        for percent, seconds in percentiles(times).items():
            yield f"{name}_p{percent}", seconds


def percentiles(times: Sequence[float]) -> dict[str, float]:
    """Return the percentiles of ``times`` by their number, between the two nearest; none of fewer than two."""
    if len(times) < 2:
        return {}
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return {str(percent): cuts[percent - 1] for percent in PERCENTILES}


def _median(values: Iterable[object]) -> float | int | None:
    numbers = [value for value in values if isinstance(value, int | float)]
    return statistics.median(numbers) if numbers else None
