"""All that a report says, worked out once, for the page, the files and the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.report.differences import Spread, answers, config_differences, environments
from pipeline.report.noise import Noise, noise
from pipeline.report.placements import Placements, read_placements
from pipeline.report.quantities import listed, tell
from pipeline.report.run_folders import Found, Job, Problem
from pipeline.report.speed import RATE, SECONDS, Front, Series, pareto, speed_series
from pipeline.report.table import Column, job_table

MOST_ROWS = 40
"""As many rows as a plot shows. A longer one can't be read, and the table has every job."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of a report.

    ``failures`` are the jobs that aren't completed; ``answers`` has each different output once, with the jobs that gave
    it; ``noise`` says which jobs can't be told apart.
    """

    jobs: tuple[Job, ...]
    problems: tuple[Problem, ...]
    statuses: tuple[tuple[str, int], ...]
    table: tuple[Column, ...]
    failures: tuple[Job, ...]
    differences: tuple[Spread, ...]
    environments: tuple[Spread, ...]
    series: tuple[Series, ...]
    front: Front
    placements: Placements
    answers: tuple[tuple[Job, tuple[str, ...]], ...]
    noise: Noise


def summarise(found: Found) -> Summary:
    """Return what there is to say about the jobs that were ``found``."""
    jobs, differences, within = found.jobs, config_differences(found.jobs), noise(found.jobs)
    return Summary(
        jobs=jobs,
        problems=found.problems,
        statuses=tuple(Counter(job.run.status for job in jobs).most_common()),
        table=job_table(jobs, differences, within),
        failures=tuple(job for job in jobs if job.run.failure),
        differences=differences,
        environments=environments(jobs),
        series=speed_series(jobs, differences),
        front=pareto(jobs),
        placements=read_placements(jobs, most=MOST_ROWS),
        answers=answers(jobs),
        noise=within,
    )


def headline(summary: Summary) -> list[tuple[str, str, str]]:
    """Return the few facts that stand on top: what, how much, and of which job."""
    jobs = summary.jobs
    counts = ", ".join(f"{count:,} {status}" for status, count in summary.statuses)
    facts = [("jobs", f"{len(jobs):,}", counts)]
    timed = [(seconds, job) for job in jobs if (seconds := job.run.metric(SECONDS)) is not None]
    if timed:
        seconds, job = min(timed, key=lambda pair: pair[0])
        rate = job.run.metric(RATE)
        note = f"{job.name}, {rate:,.1f} tokens/s" if rate is not None else job.name
        like = summary.noise.like.get(job.name)
        note += f"; within the noise of {listed(like)}" if like else ""
        note += "; measured earlier" if job.run.provenance.is_cached else ""
        facts.append(("fastest token", tell(seconds, "seconds"), note))
    disturbed = [job.name for job in jobs if job.run.provenance.busy]
    if disturbed:
        facts.append(("busy", f"{len(disturbed):,}", f"{listed(disturbed)}: others used the processor meanwhile"))
    if summary.front.points:
        least = summary.front.points[0]
        facts.append(("least memory", tell(least.x, "bytes"), f"{least.job}, measured peak"))
    if summary.answers:
        same = len(summary.answers) == 1
        facts.append(("answers", "the same" if same else f"{len(summary.answers):,} different", _answered(summary)))
    return facts


def _answered(summary: Summary) -> str:
    return f"{sum(len(names) for _, names in summary.answers):,} jobs answered"


def labels(jobs: Sequence[Job], differences: Sequence[Spread]) -> dict[str, str]:
    """Return each job's name → its name and the values that set it apart, for a row of a plot."""
    words: dict[str, list[str]] = {job.name: [job.name] for job in jobs}
    for entry in differences:
        for value, names in entry.values:
            for name in names:
                words[name].append(value)
    return {name: "  ".join(parts) for name, parts in words.items()}
