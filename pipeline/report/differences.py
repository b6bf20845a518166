"""What differs between jobs, and under which conditions they were measured: what stands on top of the page.

Each condition is told once where all jobs share it; where they don't, each value has its jobs. A job whose record
doesn't say has no part in it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from offstage.pipeline.plain_data import leaves
from offstage.pipeline.report.quantities import tell
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.run_schema import Run
from offstage.pipeline.stage import model_name

ABSENT = "not given"


@dataclass(frozen=True, slots=True)
class Spread:
    """One key and the values that the jobs have for it, each with the names of those jobs."""

    key: str
    values: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def differs(self) -> bool:
        """Whether there is more than one value."""
        return len(self.values) > 1

    @property
    def by_job(self) -> dict[str, str]:
        """The value of each job."""
        return {name: value for value, names in self.values for name in names}


def flatten(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the leaves of ``tree`` by their dotted keys, as text; an empty mapping has none."""
    return {key: as_text(value) for key, value in leaves(tree) if value != {}}


def as_text(value: Any) -> str:
    """Return ``value`` as one would write it in YAML: a string that looks like something else keeps its quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else _scalar_text(value)


@lru_cache(maxsize=2**14, typed=True)
def _scalar_text(value: Any) -> str:
    """Return one value as text. Thousands of records say the same words, and 1 isn't 1.0, nor true."""
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        return value
    return json.dumps(value)


def spread(maps: Mapping[str, Mapping[str, str]]) -> tuple[Spread, ...]:
    """Return every key of ``maps`` (a job's name → key → value), in the order in which they first stand there."""
    keys = dict.fromkeys(key for flat in maps.values() for key in flat)
    spreads = []
    for key in keys:
        values: dict[str, list[str]] = {}
        for job, flat in maps.items():
            values.setdefault(flat.get(key, ABSENT), []).append(job)
        spreads.append(Spread(key, tuple((value, tuple(jobs)) for value, jobs in values.items())))
    return tuple(spreads)


def config_differences(jobs: Sequence[Job]) -> tuple[Spread, ...]:
    """Return the config keys whose values differ. A run that ended before its config was resolved has no say."""
    maps = {job.name: flatten(job.run.config) for job in jobs if job.run.config}
    return tuple(entry for entry in spread(maps) if entry.differs)


def answers(jobs: Sequence[Job]) -> tuple[tuple[Job, tuple[str, ...]], ...]:
    """Return each different set of results once: the first job that gave it, and the names of all that did."""
    groups: dict[tuple[tuple[str, object], ...], list[Job]] = {}
    for job in jobs:
        if job.run.outputs:
            said = tuple((answer.title, answer.result) for answer in job.run.outputs)
            groups.setdefault(said, []).append(job)
    return tuple((group[0], tuple(job.name for job in group)) for group in groups.values())


_MACHINE: Mapping[str, str] = {
    "cpu": "{}",
    "cores": "{} cores",
    "cores_allowed": "{} of them allowed",
    "core_quota": "a quota of {} cores",
    "memory_bytes": "{} of memory",
    "memory_limit_bytes": "{} of it allowed",
    "jobs_beside": "jobs beside it at most: {}, so that seconds are contended",
}
"""What is told of the machine, by the keys of a record's environment."""
_NO_PACKAGES = ("cpu", "platform", "git_commit")
_SHORT = 12
"""So many characters of a commit tell it from others."""


def conditions(jobs: Sequence[Job]) -> tuple[Spread, ...]:
    """Return what was measured and on what: the model, what was asked of it, the machine and the versions."""
    spreads = spread({job.name: _told(job.run) for job in jobs})
    present = (Spread(one.key, tuple(each for each in one.values if each[0] != ABSENT)) for one in spreads)
    return (*present, *_versions(jobs), *_dates(jobs))


def _told(run: Run) -> dict[str, str]:
    """Return what the record of ``run`` says of its conditions, each in words; what it doesn't say isn't there."""
    stages, asked = run.config.get("stages"), str(run.config.get("dtype") or "")
    count = f"{tell(run.model.count, 'parameters')} parameters" if run.model.count else ""
    size = tell(run.model.bytes, "bytes") if run.model.bytes else ""
    dtypes = sorted(run.model.parameters, key=lambda name: -(run.model.parameters[name] or 0))
    hosts = Counter(host.cpu or ("an unknown processor" if host.record else "planned for") for host in run.hosts)
    facts = {
        "model": _joined(run.model.class_name, count),
        "checkpoint": _checkpoint(run.config.get("model")),
        "dtype": _joined(*dtypes, size) if dtypes else asked if run.status == "completed" else "",
        "last stage": str(stages[-1]) if isinstance(stages, list) and stages else "",
        "prompts": _prompts(run),
        "machine": _machine(run.environment),
        "hosts": ", ".join(f"{each}x {cpu}" for cpu, each in hosts.items()),
        "platform": str(run.environment.get("platform") or ""),
        "repository": _commit(run.environment.get("repository")),
    }
    return {name: words for name, words in facts.items() if words}


def _joined(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def told_differences(entries: Sequence[Spread]) -> str:
    """Return in a sentence in which of the conditions ``entries`` the jobs differ."""
    differing = [entry.key for entry in entries if entry.differs]
    if not differing:
        return "The same for all jobs."
    *first, last = differing
    names = f"{', '.join(first)} and {last}" if first else last
    return f"The jobs differ in {names}: each value has its jobs behind it."


def _checkpoint(node: object) -> str:
    if not isinstance(node, dict):
        return ""
    return _joined(
        model_name({"model": node}), *(f"{key} {node[key]}" for key in ("revision", "adapter") if node.get(key))
    )


def _prompts(run: Run) -> str:
    """Return how many prompts were answered, how long they are, and how many tokens each got."""
    answers = [answer for answer in run.outputs if answer.token_ids]
    if not answers:
        return ""
    lengths = [answer.prompt_tokens for answer in answers if answer.prompt_tokens is not None]
    of = f", of {_from_to(lengths)} tokens" if lengths else ""
    new = _from_to([len(answer.token_ids or ()) for answer in answers])
    return f"{len({answer.title for answer in answers}):,}{of}, answered by {new} new ones"


def _from_to(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _machine(environment: Mapping[str, Any]) -> str:
    figures = {key: environment.get(key) for key in _MACHINE}
    figures["cores_allowed"] = None if figures["cores_allowed"] == figures["cores"] else figures["cores_allowed"]
    values = {key: _size(value) if "bytes" in key else value for key, value in figures.items() if value}
    hardware = _joined(*(_MACHINE[key].format(value) for key, value in values.items()))
    listed = environment.get("accelerators")
    every = [one if isinstance(one, dict) else {"name": one} for one in (listed if isinstance(listed, list) else ())]
    names = Counter(f"{one.get('name')} ({_size(one.get('memory_bytes'))})" for one in every)
    accelerators = ", ".join(f"{count}x {name}" for name, count in names.items()) or "no accelerator"
    return f"{hardware}; {accelerators}" if hardware else ""


def _size(value: Any) -> str:
    return tell(value, "bytes") if isinstance(value, int | float) else str(value)


def _versions(jobs: Sequence[Job]) -> list[Spread]:
    """Return the packages whose version all jobs share in one line, then each of the others."""
    maps = {job.name: _packages(job.run) for job in jobs if job.run.environment}
    entries = spread(maps)
    same = ", ".join(f"{entry.key} {entry.values[0][0]}" for entry in entries if not entry.differs)
    shared = [Spread("versions", ((same, tuple(maps)),))] if same else []
    return shared + [entry for entry in entries if entry.differs]


def _packages(run: Run) -> dict[str, str]:
    """Return package → version of those that are installed, offstage's with its commit."""
    said = run.environment
    packages = {name: one for name, one in said.items() if isinstance(one, str) and name not in _NO_PACKAGES}
    if "offstage" in packages and (
        commit := _commit({"commit": said.get("git_commit"), "dirty": said.get("git_dirty")})
    ):
        packages["offstage"] += f" at {commit}"
    return packages


def _commit(state: object) -> str:
    """Return the commit of a checkout, and whether its files were changed."""
    noted = state if isinstance(state, dict) else {}
    changed = " with changes" * (noted.get("dirty") is True)
    return f"{str(noted['commit'])[:_SHORT]}{changed}" if noted.get("commit") else ""


def _dates(jobs: Sequence[Job]) -> list[Spread]:
    """Return when the first job began and when the last one did: these differ in any sweep, and make no difference."""
    begun = sorted((job.run.started[:16].replace("T", " "), job.name) for job in jobs if job.run.started)
    ends = dict.fromkeys(when for when, _ in (begun[:1] + begun[-1:]))
    return [Spread("begun", ((f"{' to '.join(ends)} UTC", tuple(name for _, name in begun)),))] if begun else []
