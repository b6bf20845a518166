"""Jobs by the checkpoint that they ran: those of two are never joined by a line, a front or a comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from offstage.pipeline.report.differences import answers, config_differences, flatten, spread
from offstage.pipeline.report.noise import Noise, noise
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.report.speed import Front, Series, pareto, speed_series
from offstage.pipeline.stage import model_name

MOST_ROWS = 40
"""As many rows as a plot shows. A longer one can't be read, and the table has every job."""
_NO_CHECKPOINT = ("tokenizer", "no_split", "trust_remote_code", "allow_links", "attn_implementation", "quantize")
"""Keys of ``model`` that change how a checkpoint is used, and not which one it is."""


@dataclass(frozen=True, slots=True)
class CheckpointGroup:
    """The jobs of one checkpoint, called ``title``, and what is worked out of them together.

    ``answers`` has each different output once, with the jobs that gave it; ``noise`` says which jobs can't be told
    apart; ``labels`` has each job's name → its name and the values that set it apart, for a row of a plot.
    """

    title: str
    jobs: tuple[Job, ...]
    series: tuple[Series, ...]
    front: Front
    answers: tuple[tuple[Job, tuple[str, ...]], ...]
    noise: Noise
    labels: Mapping[str, str]


def group_jobs(jobs: Sequence[Job]) -> tuple[CheckpointGroup, ...]:
    """Return the groups of ``jobs``, in the order of their first jobs.

    A job whose record has no config has a group of its own kind: nothing says what it ran.
    """
    members: dict[str, list[Job]] = {}
    for job in jobs:
        members.setdefault(_checkpoint(job), []).append(job)
    titles = _titles([group[0] for group in members.values()])
    return tuple(_group(title, group) for title, group in zip(titles, members.values(), strict=True))


def _group(title: str, jobs: Sequence[Job]) -> CheckpointGroup:
    differences = config_differences(jobs)
    by_job = [entry.by_job for entry in differences]
    values = {job.name: [each[job.name] for each in by_job if job.name in each] for job in jobs}
    return CheckpointGroup(
        title=title,
        jobs=tuple(jobs),
        series=speed_series(jobs, differences),
        front=pareto(jobs),
        answers=answers(jobs),
        noise=noise(jobs),
        labels={name: "  ".join([name, *words]) for name, words in values.items()},
    )


def _checkpoint(job: Job) -> str:
    """Return what is the same for jobs of one checkpoint."""
    node = _node(job)
    return json.dumps({key: value for key, value in node.items() if key not in _NO_CHECKPOINT}, sort_keys=True)


def _node(job: Job) -> Mapping[str, Any]:
    node = job.run.config.get("model")
    return node if isinstance(node, dict) else {}


def _titles(firsts: Sequence[Job]) -> list[str]:
    """Return a title for each group, of which ``firsts`` has one job: the shortest names that tell them apart."""
    names = [model_name({"model": _node(job)}) or "no model recorded" for job in firsts]
    short = [PurePath(name).name or name for name in names]
    titles = [one if short.count(one) == 1 else name for one, name in zip(short, names, strict=True)]
    every = spread({str(index): flatten(_node(job)) for index, job in enumerate(firsts)})
    apart = {entry.key: entry.by_job for entry in every if entry.differs and entry.key != "path"}
    details = [", ".join(f"{key}={value[str(index)]}" for key, value in apart.items()) for index in range(len(firsts))]
    return [
        title if titles.count(title) == 1 else f"{title}, {more}" for title, more in zip(titles, details, strict=True)
    ]


def joined_noise(groups: Sequence[CheckpointGroup]) -> Noise:
    """Return what can be said of the differences within all ``groups``."""
    like = {name: others for group in groups for name, others in group.noise.like.items()}
    pairs, undecided = (sum(getattr(group.noise, count) for group in groups) for count in ("pairs", "undecided"))
    return Noise(like, pairs, undecided)
