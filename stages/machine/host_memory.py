"""What the host can still give: the smaller of what the system has available and what the process's cgroups allow.

A container's limit isn't seen in ``/proc/meminfo``; a process that goes by it is killed. Limits nest: a group may hold
no more than any of the groups around it. What this process holds of itself, Python and the libraries, is counted as
available: a plan is the same whether it is made before or after heavy imports, and that share is a stated term of the
budget instead. What it holds beyond is a caller's data, another model say, and isn't available.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offstage.pipeline.memory_cgroups import memory_limits, read_lines

PROCESS_BYTES = 313 * 10**6
"""What the process holds on the host beside weights, Python, torch and transformers, imported and warm: nominally.

``offstage.stages.machine.process_memory`` measures it; this is for where that can't be.
"""

PEFT_BYTES = 18 * 10**6
"""What it holds besides where peft is imported, with what that imports, and an adapter's modules were made."""

CACHE_LIBRARY_BYTES = {"quanto": 10 * 10**6, "hqq": 10 * 10**6}
"""What it holds besides where a library quantises the KV cache, once that was imported and used."""

TRAINING_BYTES = 40 * 10**6
"""What it holds besides where it trains: what torch imports for optimizers, and threads of the backward pass."""

_STEP_BYTES = 16 * 2**20
"""In which a group's bytes are counted: half of it is within the margin that budgets leave."""


@dataclass(frozen=True, slots=True)
class Host:
    """Host memory in bytes, as this process would find it had it only begun.

    ``total_bytes`` is what there is, or the tightest cgroup limit; ``available_bytes`` what the system and the groups
    leave; ``process_bytes`` what the process of a run takes of that beside weights. ``limit`` is the file or key that
    says how much is available, empty where that is what the system has.
    """

    total_bytes: int
    available_bytes: int
    process_bytes: int = PROCESS_BYTES
    limit: str = ""


def host_memory(root: Path = Path("/"), *, process_bytes: int = PROCESS_BYTES) -> Host:
    """Return this machine's host memory. ``root`` is where ``proc`` and ``sys`` lie.

    Of what this process holds ``process_bytes`` count as the process itself, and a quarter more, since a rehearsal
    leaves some behind.
    """
    system = _table(root / "proc/meminfo")
    own = min(_table(root / "proc/self/status").get("RssAnon", 0) * 1024, process_bytes * 5 // 4)
    total, available, limit = system["MemTotal"] * 1024, system["MemAvailable"] * 1024 + own, ""
    for allowed, group, folder in memory_limits(root):
        stat = _table(folder / "memory.stat")
        charged = sum(stat.get(name, 0) for name in group.interface.usage_keys)
        left, total = allowed - _steadily(charged - own), min(total, allowed)
        if left < available:
            available, limit = left, str(folder / group.interface.limit)
    return Host(total, max(0, min(available, total)), limit=limit)


def _steadily(others: int) -> int:
    """Return what ``others`` in a group hold, in whole steps: two plans of one group must find the same memory.

    The kernel adds up what processes hold now and then, so that a group's count and its process's are some megabytes
    apart.
    """
    return max(0, round(others / _STEP_BYTES) * _STEP_BYTES)


def _table(path: Path) -> dict[str, int]:
    """Return the ``name: number`` or ``name number`` lines of a file of the kernel, none where it isn't there."""
    table = {}
    for line in read_lines(path):
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdigit():
            table[words[0]] = int(words[1])
    return table
