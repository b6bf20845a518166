"""How fast the machine moves bytes: given by the config, or measured once and kept beside the cache.

Decoding one token reads every weight once and does little else, so the bytes a second of each place that weights lie in
say how long a token takes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from pipeline.atomic_files import replace_file
from stages.machine import probes
from stages.units import parse_size

FILE_NAME = "rates.json"
_STEPS_AN_OCTAVE = 8


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second of storage, host memory, the link to an accelerator, and an accelerator's memory."""

    storage: int = 10**9
    host: int = 10 * 10**9
    link: int = 12 * 10**9
    device: int = 800 * 10**9


def read_rates(hardware: Mapping[str, Any]) -> Rates:
    """Return the rates that ``hardware.rates`` gives (``{storage: 3GB, link: 25GB}``), or nominal ones."""
    return Rates(**{name: parse_size(size) for name, size in (hardware.get("rates") or {}).items()})


def local_rates(folder: Path, sample: Path | None, accelerators: Sequence[str] = ()) -> Rates:
    """Return this machine's rates, coarsely: those kept in ``folder``, or measured now and kept there.

    ``sample`` is a large file on the storage in question (a shard of the checkpoint); each file system has a rate
    of its own. ``accelerators`` are the names of those that are here; the first one's link and memory are measured.
    What can't be measured keeps its nominal value.
    """
    path = folder / FILE_NAME
    kept = _read(path)
    wanted: dict[str, tuple[str, Callable[[], int | None]]] = {"host": ("host", probes.copy_speed)}
    if sample is not None:
        wanted["storage"] = f"storage {sample.stat().st_dev}", lambda: probes.read_speed(sample)
    if accelerators:
        wanted["link"] = f"link {accelerators[0]}", probes.link_speed
        wanted["device"] = f"device {accelerators[0]}", probes.device_speed
    if not {key for key, _ in wanted.values()} <= kept.keys():
        kept = _measured(path, dict(wanted.values()))
    found = {name: kept.get(key) for name, (key, _) in wanted.items()}
    return Rates(**{name: coarse_rate(speed) for name, speed in found.items() if speed})


def _measured(path: Path, wanted: Mapping[str, Callable[[], int | None]]) -> dict[str, int]:
    """Return what ``path`` keeps, with what was missing measured and kept there too.

    One process measures at a time: runs that start together must plan with the same figures.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        kept = _read(path)
        fresh = {key: _measure(probe) for key, probe in wanted.items() if key not in kept}
        found = kept | {key: speed for key, speed in fresh.items() if speed}
        if found != kept:
            replace_file(path, json.dumps(found) + "\n")
    return found


def _read(path: Path) -> dict[str, int]:
    kept: dict[str, int] = json.loads(path.read_text()) if path.is_file() else {}
    return kept


def _measure(probe: Callable[[], int | None]) -> int | None:
    """Return what ``probe`` measures; null where the machine refuses it: an accelerator without free memory, say.

    A torch that was built without accelerators says so by an ``AssertionError``.
    """
    try:
        return probe()
    except (OSError, RuntimeError, AssertionError):
        return None


def coarse_rate(speed: int) -> int:
    """Return the nearest of 8 steps an octave: what is measured twice is nearly the same, and a plan's key exactly."""
    return round(2 ** (round(math.log2(speed) * _STEPS_AN_OCTAVE) / _STEPS_AN_OCTAVE))
