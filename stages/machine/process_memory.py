"""What the process of a run holds beside weights: measured once an environment, and kept beside the cache.

No constant knows it. transformers imports what it finds installed (scipy, scikit-learn), and builds of torch differ by
hundreds of megabytes. So the embedded model is run once, in a process of its own, which imports all that a run does.
With an accelerator it streams to that one, and samples: the driver's context, what the host keeps of the kernels that
were loaded (about a gigabyte on an H100), and the workspaces of cuBLAS, which lie in the accelerator's own memory.
Most of its time goes to imports, as most of the time of the run that asks does: it can begin while that one imports.
Where memory is too short for both at once, under a container's limit, it comes before.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from offstage.pipeline.cache.sealed_files import write_sealed
from offstage.pipeline.stage import MEASURED
from offstage.stages.machine.expandable_segments import try_out
from offstage.stages.machine.hardware import driver_free_bytes
from offstage.stages.machine.host_memory import PROCESS_BYTES
from offstage.stages.machine.kept_figures import kept_figure
from offstage.stages.machine.own_process import begun, has_room, measure_apart

FILE_NAME = "process_memory.json"

_log = logging.getLogger("offstage")

STEP_BYTES = 4 * 10**6
"""Figures are kept in such steps: what is measured twice is nearly the same, and a plan's key exactly."""

_CONFIG = (
    "hardware.devices=[]", "+hardware.host.memory=8GB", "max_memory.cpu=16MB", "stages=generate", "generate=greedy",
    "generate.max_new_tokens=4",
)  # fmt: skip
"""A run on a machine that is described: it measures neither rates nor kernels."""

_WITH_ACCELERATOR = (
    "+hardware.host.memory=8GB", "max_memory={0: 4MB, cpu: 16MB}", "stages=generate", "generate=sample",
    "generate.max_new_tokens=4", "+generate.top_k=50",
    "hardware.rates={storage: 1GB, host: 10GB, host_to_device: 12GB, device: 800GB, dequantising: 4GB, calls: 15000}",
)  # fmt: skip
"""The same with accelerator 0, which is really there. Half of the weights come over its link."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes that a run's process holds of all that is neither weights nor the request's.

    ``host`` is anonymous memory of the host; ``device`` what libraries take of the memory of an accelerator that
    computes, by way of torch's allocator; ``context`` what the driver takes of it besides. ``expands`` says that
    segments of that allocator can expand there.
    """

    host: int = PROCESS_BYTES
    device: int = 0
    context: int = 0
    expands: bool = False


NOMINAL = ProcessMemory()
NOMINAL_WITH_ACCELERATOR = ProcessMemory(host=1_400 * 10**6, device=36 * 10**6, context=700 * 10**6)
"""Where it can't be measured: about what it was on an H100, with torch 2.11 and CUDA 13."""
_WITH_CUDA_BUILD = ProcessMemory(host=460 * 10**6)
"""The same without an accelerator where torch is built for some: what it was with torch 2.13 for CUDA 13."""
_BUILT_FOR = re.compile(r"^(cuda|hip)\b.*= *'", re.MULTILINE)
"""What torch's ``version.py`` says of a build for accelerators."""


_begun: dict[tuple[Path, str], Future[ProcessMemory]] = {}
"""What is being found, and was asked for by nobody yet."""


def begin_process_memory(folder: Path, *, accelerator: str = "") -> None:
    """Have what ``process_memory`` returns be found from now on, in a thread; who asks waits for it.

    A process that ends meanwhile waits for nothing, and the one that is measured ends with it. Where there is no room
    for what this process imports meanwhile, it is found before.
    """
    if (folder, accelerator) in _begun:
        return
    find = partial(_find, folder, accelerator)
    if has_room(nominal(accelerator).host):
        future = begun(find)
    else:
        future = Future[ProcessMemory]()
        future.set_result(find())
    _begun[folder, accelerator] = future


def process_memory(folder: Path, *, accelerator: str = "") -> ProcessMemory:
    """Return what a run's process holds beside weights: as kept in ``folder``, or measured and kept now.

    ``accelerator`` is the name of the one that is there, empty without one. Where it can't be measured it is nominal.
    """
    future = _begun.pop((folder, accelerator), None)
    return _find(folder, accelerator) if future is None else future.result()


def _find(folder: Path, accelerator: str) -> ProcessMemory:
    figure = kept_figure(folder, FILE_NAME, _key(accelerator), partial(_measure_apart, accelerator), of_user=True)
    return nominal(accelerator) if figure is None else ProcessMemory(**figure)


def nominal(accelerator: str = "") -> ProcessMemory:
    """Return what the process of a run is taken to hold where that can't be measured; torch isn't imported for it."""
    if accelerator:
        return NOMINAL_WITH_ACCELERATOR
    torch = find_spec("torch")
    with suppress(OSError):
        if torch is not None and torch.origin is not None:
            said = Path(torch.origin).with_name("version.py").read_text(encoding="utf-8")
            return _WITH_CUDA_BUILD if _BUILT_FOR.search(said) else NOMINAL
    return NOMINAL


def _key(accelerator: str) -> str:
    return f"{identity()} on {accelerator}" if accelerator else identity()


def identity(paths: list[str] | None = None) -> str:
    """Return what the figure hangs on: what it is made of, Python, and all distributions that ``paths`` (``sys.path``)
    hold, as a hash.

    Their folders are named by name and version: to look at these takes a run no time. What a package brings along for
    itself isn't installed: setuptools puts it on ``sys.path`` once it is imported, which not every process does. A
    version of this project whose figure is made of something else keeps its own.
    """
    names: set[str] = set()
    for path in map(Path, sys.path if paths is None else paths):
        with suppress(OSError):
            if not path.parent.joinpath("__init__.py").exists():
                names.update(each.name for each in path.iterdir() if each.suffix in (".dist-info", ".egg-info"))
    version, made_of = ".".join(map(str, sys.version_info[:3])), ", ".join(each.name for each in fields(ProcessMemory))
    installed = f"{len(names)} distributions {sha256(' '.join(sorted(names)).encode()).hexdigest()[:16]}"
    return f"{made_of}; python {version}; {installed}"


def _measure_apart(accelerator: str) -> dict[str, int] | None:
    """Return what ``measure`` does; null where memory is too short for a second process, or where that fails.

    Before torch is imported here, this process holds less than half of what it will, and the other no more than is
    nominal.
    """
    _log.info("measures what the process of a run holds, once for what is installed here: a few seconds")
    beside, own = nominal(accelerator).host, PROCESS_BYTES
    if "torch" not in sys.modules:
        beside, own = beside - PROCESS_BYTES, PROCESS_BYTES // 2
    with TemporaryDirectory(prefix="offstage-") as folder:
        peaks: dict[str, int] | None = measure_apart(
            "machine.process_memory", accelerator, beside=beside, own=own, folder=Path(folder)
        )
        return peaks


def measure(accelerator: str) -> dict[str, int] | None:
    """Return the peaks of a run of the embedded model less what its plan has for all else; null where they can't be.

    This process is that run, in its folder. Its plan goes by the nominal figure without an accelerator, which stands in
    its cache.
    """
    folder = Path("outputs/cache", MEASURED)
    folder.mkdir(parents=True)
    write_sealed(folder / FILE_NAME, {_key(accelerator): asdict(NOMINAL)})
    from offstage.pipeline import commands

    context, expands = _context() if accelerator else (0, False)
    sys.argv[1:] = _WITH_ACCELERATOR if accelerator else _CONFIG
    try:
        commands.offstage()
    except SystemExit as end:
        if end.code:
            return None
    records, plans = list(Path().glob("outputs/runs/*/*/run.json")), list(Path().glob("outputs/cache/plan/*/plan.json"))
    measured = _read(records[0], plans[0]) if records and plans else None
    return None if measured is None else asdict(replace(measured, context=context, expands=expands))


def _context() -> tuple[int, bool]:
    """Make the context of accelerator 0; return what the driver takes of its memory for that, and whether segments of
    torch's allocator can expand there.
    """
    import torch

    before = driver_free_bytes(0)
    expands = try_out()
    after = driver_free_bytes(0)
    if before is None or after is None:
        return NOMINAL_WITH_ACCELERATOR.context, expands
    return _in_steps(before - after - torch.cuda.memory_reserved(0)), expands


def _read(record: Path, plan: Path) -> ProcessMemory | None:
    """Return what the run of this ``record`` held beside what its ``plan`` predicted of weights and request.

    What torch reserves beside what it is asked for is no part of what is measured.
    """
    try:
        memory, devices = json.loads(record.read_text())["memory"], json.loads(plan.read_text())["devices"]
        for name, device in devices.items():
            if name in memory["predicted"]:
                memory["predicted"][name] -= device["ledger"].get("allocator", 0)
        beside = {name: int(peak) - int(memory["predicted"][name]) for name, peak in memory["measured"].items()}
        return ProcessMemory(_in_steps(beside["cpu"] + PROCESS_BYTES), _in_steps(beside.get("0", 0)))
    except (ValueError, KeyError, TypeError):
        return None


def _in_steps(count: int) -> int:
    return max(0, -(-count // STEP_BYTES) * STEP_BYTES)
