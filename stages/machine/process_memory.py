"""What the process of a run holds on the host beside weights: measured once an environment, and kept beside the cache.

No constant knows it. transformers imports what it finds installed (scipy, scikit-learn), and builds of torch differ by
hundreds of megabytes. So the embedded model is run once, in a process of its own, which imports all that a run does.
After the run that process has what it takes to measure how fast the host decodes, where that is asked for too: most of
the time of either probe goes to the imports.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from offstage.pipeline.cache.sealed_files import write_sealed
from offstage.pipeline.stage import MEASURED
from offstage.stages.machine import decoding_probe
from offstage.stages.machine.host_memory import PROCESS_BYTES
from offstage.stages.machine.kept_figures import KeptFigure
from offstage.stages.machine.own_process import has_room, measure_apart
from offstage.stages.machine.rates import host_rates

FILE_NAME = "process.json"

_log = logging.getLogger("offstage")

_STEP = 4 * 10**6
"""Figures are kept in such steps: what is measured twice is nearly the same, and a plan's key exactly."""

_CONFIG = (
    "hardware.devices=[]", "+hardware.host.memory=8GB", "max_memory.cpu=16MB", "stages=generate", "generate=greedy",
    "generate.max_new_tokens=4",
)  # fmt: skip
"""A run on a machine that is described: it measures neither rates nor kernels."""


def process_bytes(folder: Path, *, rates: bool = False) -> int:
    """Return the anonymous memory of a run's process without weights: as kept in ``folder``, or measured and kept now.

    Where it can't be measured it is ``PROCESS_BYTES``. With ``rates`` those of the host are measured and kept too,
    where a process is measured.
    """
    probe = partial(_measure_apart, folder if rates else None)
    return int(KeptFigure(FILE_NAME, identity(), probe, PROCESS_BYTES, of_user=True).get(folder))


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


def _measure_apart(rates: Path | None) -> int | None:
    """Return what ``measure`` does; null where memory is too short for a second process, or where that fails."""
    _log.info("measures what the process of a run holds, once for what is installed here: a few seconds")
    with TemporaryDirectory(prefix="offstage-") as folder:
        kept = str(rates.absolute()) if rates else ""
        found: int | None = measure_apart("process_memory", kept, beside=PROCESS_BYTES, folder=Path(folder))
        return found


def measure(rates: str) -> int | None:
    """Return the peak of a run of the embedded model less what its plan has for all else; null where it can't be.

    This process is that run, in its folder, and then what measures the host's rates, kept in ``rates`` unless that is
    empty. The run's plan goes by the nominal figure, which stands in its cache.
    """
    kept = Path("outputs/cache", MEASURED)
    kept.mkdir(parents=True)
    write_sealed(kept / FILE_NAME, {identity(): PROCESS_BYTES})
    from offstage.pipeline import commands

    sys.argv[1:] = _CONFIG
    try:
        commands.offstage()
    except SystemExit as end:
        if end.code:
            return None
    if rates and has_room(decoding_probe.BYTES):
        host_rates(Path(rates), decoding_probe.measure)
    records = list(Path().glob("outputs/runs/*/*/run.json"))
    return _read(records[0]) if records else None


def _read(record: Path) -> int | None:
    """Return what the run of this ``record`` held beside what was predicted of weights and request."""
    try:
        memory = json.loads(record.read_text())["memory"]
        held = int(memory["measured"]["cpu"]) - (int(memory["predicted"]["cpu"]) - PROCESS_BYTES)
        return -(-held // _STEP) * _STEP
    except (ValueError, KeyError, TypeError):
        return None
