"""Work of a model that is done again to be measured: how the time of each repeat went, the metrics made of several,
which repeats there are, and which a run still lacks.

A repeat is one pass of a whole generation, scoring or forward over the placed model; the first is stored with what came
out.
What the results depend on is the artifact's key; how often they were timed is no part of it. So repeats are kept
beside it, each an artifact of its own by the number that it has among those of one generation, scoring or forward: a
run that asks for five where three are there takes two.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offstage.pipeline.atomic_files import write_text
from offstage.pipeline.cache.fingerprint import fingerprint
from offstage.pipeline.cache.store import Store
from offstage.pipeline.errors import DisagreementError
from offstage.pipeline.measure import MeasureConfig
from offstage.pipeline.replay import first_difference
from offstage.pipeline.stage import Artifact, Report

if TYPE_CHECKING:  # what comes with torch, which a run that is served from the cache does without
    from offstage.stages.inference.cost import Metrics
    from offstage.stages.inference.session import ModelSession

REPEATS = "repeats"
"""The folder of the cache in which repeats lie: an artifact for each beyond the first, which its stage's has."""
FILE_NAME = "repeat.json"
RESERVED = "reserved"
"""What torch's allocator had of accelerators, in an artifact and in a record."""
PERCENTILES = (50, 90, 99)
_MOST_TIMES = 1000
"""Of more times than that so many are kept, evenly from their order: percentiles stay what they are."""
_BANDWIDTH = "storage_bandwidth_bytes_per_second"
Outputs = Sequence[Mapping[str, Any]]
"""What came out, as a record has it."""


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


Pass = Callable[[str], tuple[TimedRepeat, Outputs]]
"""Does all the work once more, under a title for the bar; returns how the time went, and what came out."""


def kept_repeats(cache: Path, artifact: Artifact, stored: Mapping[str, Any], *, is_new: bool) -> list[TimedRepeat]:
    """Return the repeats of ``artifact`` that are there: what it has ``stored`` itself, and those beside it.

    ``is_new`` says whether this run has made it. A list that was broken by pruning ends there.
    """
    repeats, store = [read_repeat(stored, is_earlier=not is_new)], Store(cache)
    while (entry := store.find(REPEATS, _key(artifact, len(repeats)))) is not None:
        repeats.append(read_repeat(entry.json(FILE_NAME), is_earlier=True))
    return repeats


def counted(repeats: Sequence[TimedRepeat], measure: MeasureConfig) -> list[TimedRepeat]:
    """Return those of ``repeats`` that the metrics of a run are made of.

    One that isn't whole counts only where nothing else does and no more are asked for.
    """
    fit = [one for one in repeats if one.passes_before >= measure.warmup and not (measure.fresh and one.is_earlier)]
    whole = [one for one in fit if one.is_whole]
    return whole or (fit if measure.repeats == 1 else [])


def lacking(repeats: Sequence[TimedRepeat], measure: MeasureConfig) -> int:
    """Return how many repeats a run asks for that aren't there."""
    return max(0, measure.repeats - len(counted(repeats, measure)))


def take_repeats(
    session: ModelSession[Any], artifact: Artifact, repeats: Sequence[TimedRepeat], measure: MeasureConfig, *,
    cache: Path, expected: Outputs, results: str,
) -> list[TimedRepeat]:  # fmt: skip
    """Return ``repeats`` with those that a run lacks, taken now; each is kept as it is there.

    A repeat that another process takes meanwhile is waited for and used. Raises ``DisagreementError`` where a pass
    gives other ``results`` (tokens, scores) than are ``expected``, those of ``artifact``.
    """
    store, all_repeats = Store(cache), list(repeats)

    def run(title: str) -> TimedRepeat:
        repeat, outputs = again(title)
        difference = first_difference(expected, outputs)
        if difference is not None:
            raise DisagreementError(
                f"measure.repeats: {title} gave other {results} than there were before ({difference}); metrics "
                "of different answers can't be compared: look in the model's code for what outlives a call, or in the "
                "machine for what changes its arithmetic, and set outputs to a new folder to begin anew"
            )
        return repeat

    def take(title: str, folder: Path) -> TimedRepeat:
        while session.passes < measure.warmup:
            run(f"warm-up {session.passes + 1} of {measure.warmup}")
        repeat = run(title)
        write_text(folder / FILE_NAME, json.dumps(repeat.stored()) + "\n")
        return repeat

    with ExitStack() as stack:
        stack.callback(store.release)
        again = stack.enter_context(session.repeating())
        while missing := lacking(all_repeats, measure):
            title = f"repeat {measure.repeats - missing + 1} of {measure.repeats}"
            entry, taken, _ = store.obtain(REPEATS, _key(artifact, len(all_repeats)), partial(take, title))
            all_repeats.append(taken or read_repeat(entry.json(FILE_NAME), is_earlier=True))
    return all_repeats


def measured_memory(stored: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return what devices held at most, as an artifact has it ``stored``; and what was reserved on accelerators."""
    return {name: stored[name] for name in ("measured", RESERVED) if name in stored}


def with_metrics(
    report: Report, repeats: Sequence[TimedRepeat], measure: MeasureConfig, *, seconds: str,
    describe: Callable[[Outputs, Mapping[str, Any]], str],
) -> Report:  # fmt: skip
    """Return ``report`` with the metrics of those ``repeats`` that count, and with every repeat.

    ``seconds`` is the metric of their time; ``describe`` puts outputs and metrics in a line for the screen.
    """
    fit = counted(repeats, measure)
    every = tuple(one.as_record(counts=any(one is other for other in fit)) for one in repeats)
    metrics = {**report.metrics, **combined_metrics(fit, seconds=seconds)}
    new = [one for one in repeats if not one.is_earlier]
    memory = {**report.memory, "measured": dict(new[-1].peaks)} if new else report.memory
    summary = describe(report.outputs, metrics) + f", median of {len(fit)} repeats" * (len(fit) > 1)
    return replace(report, repeats=every, metrics=metrics, memory=memory, summary=summary)


def _key(artifact: Artifact, number: int) -> str:
    return fingerprint({"stage": REPEATS, "generation": artifact.key, "number": number})
