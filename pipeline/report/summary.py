"""All that a report says, worked out once, for the page, the files and the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.installed_stages import metric_table
from offstage.pipeline.objective import SEARCH_RESULTS, objective_of
from offstage.pipeline.regular_files import read_object
from offstage.pipeline.report.checkpoint_groups import CheckpointGroup, group_jobs, joined_noise
from offstage.pipeline.report.differences import Spread, conditions, config_differences
from offstage.pipeline.report.noise import SECONDS, Noise
from offstage.pipeline.report.quantities import listed, tell
from offstage.pipeline.report.run_folders import Found, Job, Problem
from offstage.pipeline.report.speed import RATE
from offstage.pipeline.report.table import Column, job_table

Fact = tuple[str, str, str]
"""What stands on top of the page: a name, a value, and of what."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why jobs aren't completed, in one line, with all ``jobs`` that it is true of."""

    status: str
    reason: str
    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of a report.

    ``conditions`` say what was measured; ``failures`` why jobs aren't completed; ``groups`` has the jobs of each
    checkpoint and what is told of them together; ``noise`` says which jobs can't be told apart.
    """

    jobs: tuple[Job, ...]
    problems: tuple[Problem, ...]
    statuses: tuple[tuple[str, int], ...]
    table: tuple[Column, ...]
    failures: tuple[Failure, ...]
    conditions: tuple[Spread, ...]
    differences: tuple[Spread, ...]
    groups: tuple[CheckpointGroup, ...]
    noise: Noise


def summarise(runs: Found) -> Summary:
    """Return what there is to say about the jobs of ``runs``."""
    jobs, differences, groups = runs.jobs, config_differences(runs.jobs), group_jobs(runs.jobs)
    within, several = joined_noise(groups), len(groups) > 1
    checkpoints = {job.name: group.title for group in groups for job in group.jobs} if several else None
    return Summary(
        jobs=jobs,
        problems=runs.problems,
        statuses=tuple(Counter(job.run.status for job in jobs).most_common()),
        table=job_table(jobs, differences, within, checkpoints=checkpoints),
        failures=_failures(jobs),
        conditions=conditions(jobs),
        differences=differences,
        groups=groups,
        noise=within,
    )


def _failures(jobs: Sequence[Job]) -> tuple[Failure, ...]:
    """Return each different reason once, in the order of the first jobs."""
    members: dict[tuple[str, str], list[Job]] = {}
    for job in jobs:
        if job.run.failure:
            members.setdefault((job.run.status, job.run.failure), []).append(job)
    return tuple(Failure(status, reason, tuple(failed)) for (status, reason), failed in members.items())


def headline(summary: Summary) -> list[Fact]:
    """Return the few facts of all jobs: how many there are, how they ended, which were disturbed."""
    counts = ", ".join(f"{count:,} {status}" for status, count in summary.statuses)
    facts = [("jobs", f"{len(summary.jobs):,}", counts)]
    disturbed = [job.name for job in summary.jobs if job.run.provenance.contended]
    if disturbed:
        facts.append(("contended", f"{len(disturbed):,}", f"{listed(disturbed)}: others used the processor meanwhile"))
    return [*facts, *search_facts(summary.jobs)]


def search_facts(jobs: Sequence[Job]) -> Iterator[Fact]:
    """Yield what each search among ``jobs`` came to: a name, the best number, and of which job within which limits."""
    for folder in dict.fromkeys(job.run.folder.parent for job in jobs):
        results = read_object(folder / SEARCH_RESULTS)
        if not results:
            continue
        extent, objective = f"{results.get('jobs')} jobs of {results.get('trials')} trials", None
        best = next((job for job in jobs if job.run.folder == folder / str(results.get("best_job"))), None)
        with suppress(ConfigError, TypeError):
            objective = objective_of(best.run) if best is not None else None
        if best is None or objective is None:
            yield ("search", "no answer", f"none of {extent} completed within the objective's limits")
        else:
            why = f"{best.name}, best of {extent}: {objective.describe()}"
            yield ("search", tell(objective.value, objective.unit), why)


def group_facts(group: CheckpointGroup) -> list[Fact]:
    """Return the few facts of one checkpoint's jobs: what was best, and of which job."""
    facts = []
    timed = [(seconds, job) for job in group.jobs if (seconds := job.run.metric(SECONDS)) is not None]
    if timed:
        seconds, job = min(timed, key=lambda pair: pair[0])
        facts.append(("fastest token", tell(seconds, metric_table(job.run).unit(SECONDS)), _of_which(job, group.noise)))
    if group.front.points:
        least = group.front.points[0]
        facts.append(("least memory", tell(least.x, "bytes"), f"{least.job}, measured peak"))
    if group.answers:
        same = len(group.answers) == 1
        answered = f"{sum(len(names) for _, names in group.answers):,} jobs answered"
        facts.append(("answers", "the same" if same else f"{len(group.answers):,} different", answered))
    return facts


def _of_which(job: Job, within: Noise) -> str:
    rate, like = job.run.metric(RATE), within.like.get(job.name)
    note = f"{job.name}, {tell(rate, metric_table(job.run).unit(RATE))}" if rate is not None else job.name
    note += f"; within the noise of {listed(like)}" if like else ""
    return note + ("; measured earlier" if job.run.provenance.is_cached else "")
