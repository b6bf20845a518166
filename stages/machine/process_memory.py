"""What the process of a run holds beside weights: measured once an environment, and kept beside the cache.

No constant knows it. transformers imports what it finds installed (scipy, scikit-learn), and builds of torch differ by
hundreds of megabytes. So the embedded model is run once, in a process of its own, which imports all that a run does.
With an accelerator it streams to that one, and samples: the driver's context, what the host keeps of the kernels that
were loaded (about a gigabyte on an H100), and the workspaces of cuBLAS, which lie in the accelerator's own memory.
After the run that process has what it takes to measure how fast the host decodes, where that is asked for too: most of
the time of either probe goes to the imports.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from offstage.pipeline.cache.sealed_files import write_sealed
from offstage.pipeline.stage import MEASURED
from offstage.stages.machine import decoding_probe
from offstage.stages.machine.hardware import driver_free_bytes
from offstage.stages.machine.host_memory import PROCESS_BYTES
from offstage.stages.machine.kept_figures import KeptFigure
from offstage.stages.machine.own_process import has_room, measure_apart
from offstage.stages.machine.rates import host_rates

FILE_NAME = "process_memory.json"

_log = logging.getLogger("offstage")

_STEP = 4 * 10**6
"""Figures are kept in such steps: what is measured twice is nearly the same, and a plan's key exactly."""

_CONFIG = (
    "hardware.devices=[]", "+hardware.host.memory=8GB", "max_memory.cpu=16MB", "stages=generate", "generate=greedy",
    "generate.max_new_tokens=4",
)  # fmt: skip
"""A run on a machine that is described: it measures neither rates nor kernels."""

_WITH_ACCELERATOR = (
    "+hardware.host.memory=8GB", "max_memory={0: 4MB, cpu: 16MB}", "stages=generate", "generate=sample",
    "generate.max_new_tokens=4", "+generate.top_k=50",
    "hardware.rates={storage: 1GB, host: 10GB, link: 12GB, device: 800GB, unpacking: 4GB, calls: 15000}",
)  # fmt: skip
"""The same with accelerator 0, which is really there. Half of the weights come over its link."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes that a run's process holds of all that is neither weights nor the request's.

    ``host`` is anonymous memory of the host; ``device`` what libraries take of the memory of an accelerator that
    computes, by way of torch's allocator; ``context`` what the driver takes of it besides.
    """

    host: int = PROCESS_BYTES
    device: int = 0
    context: int = 0


NOMINAL = ProcessMemory()
NOMINAL_WITH_ACCELERATOR = ProcessMemory(host=1_400 * 10**6, device=36 * 10**6, context=700 * 10**6)
"""Where it can't be measured: about what it was on an H100, with torch 2.11 and CUDA 13."""


def process_memory(folder: Path, *, accelerator: str = "", rates: bool = False) -> ProcessMemory:
    """Return what a run's process holds beside weights: as kept in ``folder``, or measured and kept now.

    ``accelerator`` is the name of the one that is there, empty without one. Where it can't be measured it is nominal.
    With ``rates`` those of the host are measured and kept too, where a process is measured.
    """
    nominal = NOMINAL_WITH_ACCELERATOR if accelerator else NOMINAL
    probe = partial(_measure_apart, folder if rates else None, accelerator)
    figure = KeptFigure(FILE_NAME, _key(accelerator), probe, asdict(nominal), of_user=True)
    return ProcessMemory(**figure.get(folder))


def _key(accelerator: str) -> str:
    return f"{identity()} on {accelerator}" if accelerator else identity()


def identity(paths: list[str] | None = None) -> str:
    """Return what the figure hangs on: Python, and all distributions that ``paths`` (``sys.path``) hold, as a hash.

    Their folders are named by name and version: to look at these takes a run no time.
    """
    found: set[str] = set()
    for path in sys.path if paths is None else paths:
        with suppress(OSError):
            found.update(each.name for each in Path(path).iterdir() if each.suffix in (".dist-info", ".egg-info"))
    version = ".".join(map(str, sys.version_info[:3]))
    return f"python {version}; {len(found)} distributions {sha256(' '.join(sorted(found)).encode()).hexdigest()[:16]}"


def _measure_apart(rates: Path | None, accelerator: str) -> dict[str, int] | None:
    """Return what ``measure`` does; null where memory is too short for a second process, or where that fails."""
    _log.info("measures what the process of a run holds, once for what is installed here: a few seconds")
    with TemporaryDirectory(prefix="offstage-") as folder:
        kept = str(rates.absolute()) if rates else ""
        beside = (NOMINAL_WITH_ACCELERATOR if accelerator else NOMINAL).host
        found: dict[str, int] | None = measure_apart(
            "process_memory", kept, accelerator, beside=beside, folder=Path(folder)
        )
        return found


def measure(rates: str, accelerator: str) -> dict[str, int] | None:
    """Return the peaks of a run of the embedded model less what its plan has for all else; null where they can't be.

    This process is that run, in its folder, and then what measures the host's rates, kept in ``rates`` unless that is
    empty. The run's plan goes by the nominal figure without an accelerator, which stands in its cache.
    """
    kept = Path("outputs/cache", MEASURED)
    kept.mkdir(parents=True)
    write_sealed(kept / FILE_NAME, {_key(accelerator): asdict(NOMINAL)})
    from offstage.pipeline import commands

    context = _context_bytes() if accelerator else 0
    sys.argv[1:] = _WITH_ACCELERATOR if accelerator else _CONFIG
    try:
        commands.offstage()
    except SystemExit as end:
        if end.code:
            return None
    if rates and has_room(decoding_probe.BYTES):
        host_rates(Path(rates), decoding_probe.measure)
    records = list(Path().glob("outputs/runs/*/*/run.json"))
    found = _read(records[0]) if records else None
    return None if found is None else asdict(replace(found, context=context))


def _context_bytes() -> int:
    """Make the context of accelerator 0; return what the driver takes of its memory for that."""
    import torch

    before = driver_free_bytes(0)
    torch.zeros(1, device="cuda:0")
    after = driver_free_bytes(0)
    if before is None or after is None:
        return NOMINAL_WITH_ACCELERATOR.context
    return _in_steps(before - after - torch.cuda.memory_reserved(0))


def _read(record: Path) -> ProcessMemory | None:
    """Return what the run of this ``record`` held beside what was predicted of weights and request."""
    try:
        memory = json.loads(record.read_text())["memory"]
        beside = {name: int(held) - int(memory["predicted"][name]) for name, held in memory["measured"].items()}
        return ProcessMemory(_in_steps(beside["cpu"] + PROCESS_BYTES), _in_steps(beside.get("0", 0)))
    except (ValueError, KeyError, TypeError):
        return None


def _in_steps(count: int) -> int:
    return max(0, -(-count // _STEP) * _STEP)
