"""What a run ran on: versions, machine and commit, for the run record.

Versions are read from the packages' metadata and the commit from git's files, so that none of it imports
torch or starts a process: a run that is served from the cache must not pay for either. Only where the machine
has an accelerator is torch asked for its name.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from offstage.pipeline.git_checkout import commit_of, git_state, is_dirty
from offstage.pipeline.memory_cgroups import core_quota, memory_limits
from offstage.pipeline.regular_files import read_regular

_DISTRIBUTIONS = {
    "offstage": "offstage-pipeline",
    "torch": "torch",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "hydra": "hydra-core",
    "omegaconf": "omegaconf",
    "accelerate": "accelerate",
    "peft": "peft",
}
BUILT_FROM = "pipeline/git_commit.txt"
"""The file of the package in a wheel that names the commit that it was built from: ``.ci/commit_hook.py`` writes it."""
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_DRIVERS = ("dev/nvidiactl", "dev/kfd", "dev/dxg")
"""NVIDIA's, AMD's, and that of WSL2, where the driver is Windows'."""
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where torch looks for settings of its allocator, in its order: the first that is there has all."""
_SOURCE = Path(__file__).resolve().parents[1]


def environment(*, jobs_beside: int = 0) -> dict[str, Any]:
    """Return the run record's ``environment``: versions (null if not installed), machine, accelerators, commits.

    ``git_commit`` is offstage's own, and ``git_dirty`` says whether its files are changed; ``repository`` has the same
    of the git checkout that the current folder lies in, if there is another.

    ``cores_allowed`` are those that this process may run on, of the machine's ``cores``; ``core_quota`` and
    ``memory_limit_bytes`` are what its control groups allow, null where they set no limit. At most ``jobs_beside``
    other jobs of its sweep were at work meanwhile: seconds are contended then, and no measure of the machine.
    """
    return {
        **{name: _version(distribution) for name, distribution in _DISTRIBUTIONS.items()},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(Path("/proc/cpuinfo")),
        "cores": os.cpu_count(),
        "cores_allowed": len(allowed_cores()),
        "core_quota": core_quota(),
        "memory_limit_bytes": min((limit for limit, *_ in memory_limits()), default=None),
        "memory_bytes": psutil.virtual_memory().total,
        "accelerators": _accelerators() if has_accelerator_driver() else [],
        "jobs_beside": jobs_beside,
        "git_commit": git_commit(_SOURCE),
        "git_dirty": is_dirty(_SOURCE) if is_own_checkout(_SOURCE) else None,
        "repository": None if Path.cwd().is_relative_to(_SOURCE) else git_state(Path.cwd()),
    }


def allowed_cores() -> frozenset[int]:
    """Return the numbers of the cores that this process may run on."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset(range(os.cpu_count() or 1))
    return frozenset(os.sched_getaffinity(0))


def has_accelerator_driver(root: Path = Path("/")) -> bool:
    """Return whether a driver's device file is there: without one there is no need to import torch to ask it."""
    return any(root.joinpath(driver).exists() for driver in _DRIVERS)


def allocator_settings() -> str | None:
    """Return the settings that this process's environment has for torch's allocator of accelerators; null for none."""
    return next((os.environ[name] for name in ALLOCATOR_SETTINGS if name in os.environ), None)


def git_commit(source: Path) -> str | None:
    """Return the commit that offstage is of, its packages in ``source``; None where nothing tells.

    A checkout's is the one that is checked out, a wheel's the one that it was built from. A wheel that is installed
    somewhere below another project's checkout, or beside its ``.git``, says nothing about that project's commit.
    """
    if is_own_checkout(source):
        return commit_of(source)
    with suppress(OSError, ValueError):
        built_from = read_regular(source / BUILT_FROM).decode("ascii").strip()
        return built_from if _COMMIT.fullmatch(built_from) else None
    return None


def is_own_checkout(source: Path) -> bool:
    """Return whether ``source`` is a git checkout of offstage."""
    try:
        project = read_regular(source / "pyproject.toml").decode("utf-8")
    except (OSError, ValueError):
        return False
    return bool(re.search(r'^name = "offstage-pipeline"$', project, re.MULTILINE)) and (source / ".git").exists()


def imported_packages() -> dict[str, str]:
    """Return the versions of all distributions of which this process has imported something, by name."""
    tops, versions = {name.partition(".")[0] for name in list(sys.modules)}, dict[str, str]()
    for distribution, modules in _installed():
        if not tops.isdisjoint(modules) and (named := _named(distribution)):
            versions.setdefault(*named)
    return dict(sorted(versions.items(), key=lambda named: named[0].lower()))


@cache
def _installed() -> Sequence[tuple[metadata.Distribution, Collection[str]]]:
    """Return all distributions that are installed, each with the top names of its modules.

    ``packages_distributions`` says the same, but of a hundred distributions it takes the time in which torch's
    operators are traced: it reads every name and version, and makes a path of each file.
    """
    return [(one, _top_names(one)) for one in metadata.distributions()]


@cache
def _named(distribution: metadata.Distribution) -> tuple[str, str] | None:
    """Return the name and version that ``distribution`` says it has, or null; each look would parse its metadata."""
    said = distribution.metadata
    return (said["Name"], said["Version"]) if said["Name"] else None


def _top_names(distribution: metadata.Distribution) -> Collection[str]:
    """Return the top names of the modules of ``distribution``: as it says, or by the files that it brought."""
    if declared := (distribution.read_text("top_level.txt") or "").split():
        return declared
    files = (distribution.read_text("RECORD") or "").splitlines()
    return {line.partition(",")[0].partition("/")[0].removesuffix(".py") for line in files if ".py," in line}


@cache
def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu(cpuinfo: Path) -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.machine()


def _accelerators() -> list[dict[str, Any]]:
    """Return name and ``memory_bytes`` of each accelerator that torch can use."""
    if sys.platform != "linux":
        return []
    try:
        import torch

        every = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except (ImportError, RuntimeError, AssertionError):
        return []
    return [{"name": each.name, "memory_bytes": each.total_memory} for each in every]
