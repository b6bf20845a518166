"""A generation that is run again to be measured: which samples there are, which a run still lacks, and taking these.

What the tokens depend on is the generation's key; how often they were timed is no part of it. So samples are kept
beside it, each an artifact of its own by the number that it has among those of one generation: a run that asks for five
where three are there takes two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.atomic_files import write_text
from pipeline.cache.fingerprint import fingerprint
from pipeline.cache.store import Store
from pipeline.errors import DisagreementError
from pipeline.measure import MeasureConfig
from pipeline.replay import first_difference
from pipeline.stage import Artifact, Report
from stages.generate.timed_samples import TimedSample, figures, read_sample

if TYPE_CHECKING:
    from stages.generate.generation import Session

SAMPLES = "samples"
"""The folder of the cache in which samples lie: an artifact for each beyond the first of a generation."""
FILE_NAME = "sample.json"


def kept_samples(cache: Path, generation: Artifact, stored: Mapping[str, Any], *, is_new: bool) -> list[TimedSample]:
    """Return the samples of ``generation`` that are there: what it has ``stored`` itself, and those beside it.

    ``is_new`` says whether this run has made it. A list that was broken by pruning ends there.
    """
    found, store = [read_sample(stored, is_earlier=not is_new)], Store(cache)
    while (artifact := store.find(SAMPLES, _key(generation, len(found)))) is not None:
        found.append(read_sample(artifact.json(FILE_NAME), is_earlier=True))
    return found


def counted(samples: Sequence[TimedSample], measure: MeasureConfig) -> list[TimedSample]:
    """Return those of ``samples`` that the figures of a run are made of.

    One that isn't whole counts only where nothing else does and no more are asked for.
    """
    fit = [one for one in samples if one.passes_before >= measure.warmup and not (measure.fresh and one.is_earlier)]
    whole = [one for one in fit if one.is_whole]
    return whole or (fit if measure.repeats == 1 else [])


def lacking(samples: Sequence[TimedSample], measure: MeasureConfig) -> int:
    """Return how many samples a run asks for that aren't there."""
    return max(0, measure.repeats - len(counted(samples, measure)))


def take_samples(
    session: Session, generation: Artifact, samples: Sequence[TimedSample], measure: MeasureConfig, *, cache: Path
) -> list[TimedSample]:
    """Return ``samples`` with those that a run lacks, taken now; each is kept as it is there.

    A sample that another process takes meanwhile is waited for and used. Raises ``DisagreementError`` where a pass
    gives other tokens than ``generation`` has.
    """
    store, found = Store(cache), list(samples)
    with ExitStack() as stack:
        stack.callback(store.release)
        passes = _Passes(session, stack, generation.json("generation.json")["outputs"])
        while missing := lacking(found, measure):
            take = partial(passes.sample, f"sample {measure.repeats - missing + 1} of {measure.repeats}", measure)
            artifact, taken, _ = store.obtain(SAMPLES, _key(generation, len(found)), take)
            found.append(taken or read_sample(artifact.json(FILE_NAME), is_earlier=True))
    return found


class _Passes:
    """Passes of ``session`` whose tokens must be ``expected``."""

    def __init__(self, session: Session, stack: ExitStack, expected: Sequence[Mapping[str, Any]]) -> None:
        self._session, self._expected = session, expected
        self._make = stack.enter_context(session.decoding())

    def sample(self, title: str, measure: MeasureConfig, folder: Path) -> TimedSample:
        """Return the next pass that counts, written into ``folder``; those that warm up come before."""
        while self._session.passes < measure.warmup:
            self._run(f"warm-up {self._session.passes + 1} of {measure.warmup}")
        sample = self._run(title)
        write_text(folder / FILE_NAME, json.dumps(sample.stored()) + "\n")
        return sample

    def _run(self, title: str) -> TimedSample:
        from stages.generate.generation import outputs_of
        from stages.inference.progress import Progress

        progress = Progress()
        sample = self._session.run(self._make(), progress, title=title)
        difference = first_difference(self._expected, outputs_of(progress))
        if difference is not None:
            raise DisagreementError(
                f"measure.repeats: {title} gave other tokens than the generation had before ({difference}); figures of "
                "different answers can't be compared: look in the model's code for what outlives a call, or in the "
                "machine for what changes its arithmetic, and set outputs to a new folder to begin anew"
            )
        return sample


def with_figures(report: Report, samples: Sequence[TimedSample], measure: MeasureConfig) -> Report:
    """Return ``report`` with the figures of those ``samples`` that count, and with every sample."""
    fit = counted(samples, measure)
    samples_told = tuple(one.told(counts=any(one is other for other in fit)) for one in samples)
    metrics = {**report.metrics, **figures(fit)}
    new = [one for one in samples if not one.is_earlier]
    memory = {**report.memory, "measured": dict(new[-1].peaks)} if new else report.memory
    summary = told(report.outputs, metrics) + f", median of {len(fit)} samples" * (len(fit) > 1)
    return replace(report, samples=samples_told, metrics=metrics, memory=memory, summary=summary)


def told(outputs: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any]) -> str:
    """Return the line of the screen: how many tokens there are, and how fast they came."""
    rate = metrics.get("decode_tokens_per_second")
    tokens = sum(len(output["token_ids"]) for output in outputs)
    return f"{tokens} tokens" + (f", {rate:.1f} a second" if rate else "")


def _key(generation: Artifact, number: int) -> str:
    return fingerprint({"stage": SAMPLES, "generation": generation.key, "number": number})
