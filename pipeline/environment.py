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
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from pipeline.cgroup_files import core_quota, memory_limits

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
_DRIVERS = ("dev/nvidiactl", "dev/kfd")
_SOURCE = Path(__file__).parents[1]


def environment() -> dict[str, Any]:
    """Return the run record's ``environment``: versions (null if not installed), machine, accelerators, commit.

    ``cores_allowed`` are those that this process may run on, of the machine's ``cores``; ``core_quota`` and
    ``memory_limit_bytes`` are what its control groups allow, null where they set no limit.
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
        "git_commit": git_commit(_SOURCE),
    }


def allowed_cores() -> frozenset[int]:
    """Return the numbers of the cores that this process may run on."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset(range(os.cpu_count() or 1))
    return frozenset(os.sched_getaffinity(0))


def has_accelerator_driver(root: Path = Path("/")) -> bool:
    """Return whether a driver's device file is there: without one there is no need to import torch to ask it."""
    return any(root.joinpath(driver).exists() for driver in _DRIVERS)


def git_commit(source: Path) -> str | None:
    """Return the commit that is checked out in ``source``, None unless that is offstage's own git checkout.

    A wheel that is installed somewhere below another project's checkout, or beside its ``.git``, says nothing
    about that project's commit.
    """
    try:
        project = (source / "pyproject.toml").read_text(encoding="utf-8")
        if not re.search(r'^name = "offstage-pipeline"$', project, re.MULTILINE):
            return None
        return _head(_git_folder(source / ".git"))
    except (OSError, UnicodeDecodeError):
        return None


def _git_folder(git: Path) -> Path:
    """Return git's folder; in a worktree ``.git`` is a file that names it."""
    if git.is_dir():
        return git
    return git.parent / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()


def _head(git: Path) -> str | None:
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref:"):
        return head
    reference = head.removeprefix("ref:").strip()
    common = git / "commondir"
    shared = git / common.read_text(encoding="utf-8").strip() if common.exists() else git
    loose = shared / reference
    if loose.is_file():
        return loose.read_text(encoding="utf-8").strip()
    packed = (shared / "packed-refs").read_text(encoding="utf-8")
    match = re.search(rf"^([0-9a-f]+) {re.escape(reference)}$", packed, re.MULTILINE)
    return match[1] if match else None


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
