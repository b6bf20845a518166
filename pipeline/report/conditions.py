"""What was measured, and under which conditions: what stands on top of the page, before any figure.

Each condition is told once where all jobs share it; where they don't, each value has its jobs. A job whose record
doesn't say has no part in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offstage.pipeline.report.differences import Spread, spread
from offstage.pipeline.report.quantities import tell
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.run_schema import Run
from offstage.pipeline.stage import model_name

_MACHINE = ("cpu", "cores", "cores_allowed", "core_quota", "memory_limit_bytes", "memory_bytes", "accelerators")
_COMMIT = "git_commit"
_PLATFORM = "platform"
_NONE = "nothing"
_SHORT = 12
"""So many characters of a commit tell it from others."""


def conditions(jobs: Sequence[Job]) -> tuple[Spread, ...]:
    """Return what was measured and on what: the model, what was asked of it, the machine and the versions."""
    told = (_condition(title, jobs, told) for title, told in _TOLD.items())
    return tuple(entry for entry in (*told, *_simulated(jobs), *_versions(jobs), _dates(jobs)) if entry.values)


def told_differences(entries: Sequence[Spread]) -> str:
    """Return in a sentence in which of the conditions ``entries`` the jobs differ."""
    differing = [entry.key for entry in entries if entry.differs]
    if not differing:
        return "The same for all jobs."
    *first, last = differing
    names = f"{', '.join(first)} and {last}" if first else last
    return f"The jobs differ in {names}: each value has its jobs behind it."


def _condition(title: str, jobs: Sequence[Job], told: Callable[[Run], str]) -> Spread:
    values: dict[str, list[str]] = {}
    for job in jobs:
        value = told(job.run)
        if value:
            values.setdefault(value, []).append(job.name)
    return Spread(title, tuple((value, tuple(names)) for value, names in values.items()))


def _model(run: Run) -> str:
    counted = f"{_rounded(run.model.count)} parameters" if run.model.count else ""
    return ", ".join(filter(None, (run.model.class_name, counted)))


def _checkpoint(run: Run) -> str:
    node = run.config.get("model")
    if not isinstance(node, dict):
        return ""
    more = [f"{key} {node[key]}" for key in ("revision", "adapter") if node.get(key)]
    return ", ".join([model_name({"model": node}), *more])


def _dtype(run: Run) -> str:
    """Return the dtypes of the model, the one with the most parameters first; of older records what was asked for."""
    counts = run.model.parameters
    dtypes = ", ".join(sorted(counts, key=lambda name: -(counts[name] or 0)))
    size = f", {tell(run.model.bytes, 'bytes')}" if run.model.bytes else ""
    asked = str(run.config.get("dtype") or "") if run.status == "completed" else ""
    return f"{dtypes}{size}" if dtypes else asked


def _work(run: Run) -> str:
    stages = run.config.get("stages")
    last = str(stages[-1]) if isinstance(stages, list) and stages else ""
    return {"plan": "a plan alone: nothing ran", "generate": "generation"}.get(last, last)


def _prompts(run: Run) -> str:
    lengths = [answer.prompt_tokens for answer in run.outputs if answer.token_ids and answer.prompt_tokens is not None]
    prompts = len({answer.title for answer in run.outputs if answer.token_ids})
    if not prompts:
        return ""
    of = f" of {_from_to(lengths)} token{'s' * (max(lengths) > 1)}" if lengths else ""
    return f"{prompts:,} prompt{'s' * (prompts > 1)}{of}"


def _new_tokens(run: Run) -> str:
    lengths = [len(answer.token_ids) for answer in run.outputs if answer.token_ids]
    if not lengths:
        return ""
    total = f", {sum(lengths):,} in all" if len(lengths) > 1 else ""
    return f"{_from_to(lengths)} for each{total}" if total else _from_to(lengths)


def _from_to(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _machine(run: Run) -> str:
    known = {key: run.environment.get(key) for key in _MACHINE}
    cores, allowed, quota = known["cores"], known["cores_allowed"], known["core_quota"]
    parts = [str(known["cpu"] or ""), f"{cores} cores" if cores else ""]
    parts += [f"{allowed} of them allowed"] * (allowed is not None and allowed != cores)
    parts += [f"a quota of {quota} cores"] * (quota is not None)
    parts += [f"{_size(known['memory_bytes'])} of memory"] * (known["memory_bytes"] is not None)
    parts += [f"{_size(known['memory_limit_bytes'])} of it allowed"] * (known["memory_limit_bytes"] is not None)
    beside = run.environment.get("jobs_beside")
    parts += [f"shared with up to {beside} other job{'s' * (beside != 1)}: seconds are contended"] * bool(beside)
    told = ", ".join(filter(None, parts))
    return f"{told}; {_accelerators(known['accelerators'])}" if told else ""


def _hosts(run: Run) -> str:
    """Return of which processors the hosts are that a run was divided among, equal ones once with their count.

    Of those that a run came to nothing on, or that aren't there, only the plan is known.
    """
    counts = Counter(host.cpu or ("an unknown processor" if host.record else "planned for") for host in run.hosts)
    return ", ".join(f"{count}x {cpu}" for cpu, count in counts.items())


def _accelerators(every: object) -> str:
    """Return the names of the accelerators, equal ones once with their count."""
    listed = every if isinstance(every, list) else []
    names = [
        f"{one.get('name')} ({_size(one.get('memory_bytes'))})" if isinstance(one, dict) else str(one) for one in listed
    ]
    return ", ".join(f"{count}x {name}" for name, count in Counter(names).items()) or "no accelerator"


def _simulated(jobs: Sequence[Job]) -> list[Spread]:
    """Return which jobs had accelerators that aren't there, nothing where none had."""
    found = _condition("simulated", jobs, lambda run: _count_simulated(run) if run.config else "")
    return [found] if any(value != _NONE for value, _ in found.values) else []


def _count_simulated(run: Run) -> str:
    hardware = run.config.get("hardware")
    devices = hardware.get("devices") if isinstance(hardware, dict) else None
    count = len(devices) if isinstance(devices, list | dict) else 0
    several = "s" * (count > 1)
    return f"{count} accelerator{several}, times are those of the cpu" if count else _NONE


def _platform(run: Run) -> str:
    return str(run.environment.get(_PLATFORM) or "")


def _size(value: Any) -> str:
    return tell(value, "bytes") if isinstance(value, int | float) else str(value)


def _rounded(count: float) -> str:
    """Return a count of parameters as the field writes it: 1.10B, 7.48M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:,.0f}"


def _versions(jobs: Sequence[Job]) -> list[Spread]:
    """Return the packages whose version all jobs share in one line, then each of the others."""
    maps = {job.name: _packages(job.run) for job in jobs if job.run.environment}
    entries = spread(maps)
    same = ", ".join(f"{entry.key} {entry.values[0][0]}" for entry in entries if not entry.differs)
    shared = [Spread("versions", ((same, tuple(maps)),))] if same else []
    return shared + [entry for entry in entries if entry.differs]


def _packages(run: Run) -> dict[str, str]:
    """Return package → version of those that are installed, offstage's with its commit."""
    commit = run.environment.get(_COMMIT)
    found = {
        name: version
        for name, version in run.environment.items()
        if isinstance(version, str) and name not in (*_MACHINE, _PLATFORM, _COMMIT)
    }
    if isinstance(commit, str) and "offstage" in found:
        found["offstage"] += f" at {commit[:_SHORT]}{_changed(run.environment.get('git_dirty'))}"
    return found


def _repository(run: Run) -> str:
    """Return the commit of the checkout that the run was started in, where it is another than offstage's."""
    noted = run.environment.get("repository")
    state = noted if isinstance(noted, dict) else {}
    return f"{str(state['commit'])[:_SHORT]}{_changed(state.get('dirty'))}" if state.get("commit") else ""


def _changed(is_dirty: object) -> str:
    return " with changes" * (is_dirty is True)


def _dates(jobs: Sequence[Job]) -> Spread:
    """Return when the first job began and when the last one did: these differ in any sweep, and make no difference."""
    begun = sorted((job.run.started[:16].replace("T", " "), job.name) for job in jobs if job.run.started)
    if not begun:
        return Spread("begun", ())
    first, last = begun[0][0], begun[-1][0]
    told = f"{first} UTC" if first == last else f"{first} to {last} UTC"
    return Spread("begun", ((told, tuple(name for _, name in begun)),))


_TOLD: Mapping[str, Callable[[Run], str]] = {
    "model": _model,
    "checkpoint": _checkpoint,
    "dtype": _dtype,
    "work": _work,
    "prompts": _prompts,
    "new tokens": _new_tokens,
    "machine": _machine,
    "hosts": _hosts,
    "platform": _platform,
    "repository": _repository,
}
