"""How fast the machine moves bytes: given by the config, or measured once and kept beside the cache.

Decoding one token reads every weight once and does little else, so the bytes a second of each place that weights lie in
say how long a token takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.machine import probes
from stages.machine.kept_figures import kept_or_measured
from stages.units import parse_size

FILE_NAME = "rates.json"
_STEPS_AN_OCTAVE = 8
_LEAST, _MOST = 10**4, 10**15
"""Bytes a second below and above which nothing is: a figure beyond was damaged, or its probe was."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second of storage, host memory, the link to an accelerator, and an accelerator's memory.

    ``unpacking`` is how fast the threads that read unpack together what rests packed, in bytes as they are used.
    """

    storage: int = 10**9
    host: int = 10 * 10**9
    link: int = 12 * 10**9
    device: int = 800 * 10**9
    unpacking: int = 4 * 10**9


def read_rates(hardware: Mapping[str, Any]) -> Rates:
    """Return the rates that ``hardware.rates`` gives (``{storage: 3GB, link: 25GB}``), or nominal ones."""
    return Rates(**_read(hardware.get("rates") or {}))


def _read(given: Mapping[str, Any]) -> dict[str, int]:
    return {name: parse_size(size) for name, size in given.items()}


def local_rates(
    folder: Path, sample: Path | None, accelerators: Sequence[str] = (), *, pinned: Mapping[str, Any] | None = None
) -> Rates:
    """Return this machine's rates, coarsely: those kept in ``folder``, or measured now and kept there.

    ``sample`` is a large file on the storage in question (a shard of the checkpoint); each file system has a rate
    of its own. ``accelerators`` are the names of those that are here; the first one's link and memory are measured.
    What can't be measured keeps its nominal value; those that are ``pinned`` (``{storage: 3GB}``) aren't measured.
    """
    wanted: dict[str, tuple[str, Callable[[], int | None]]] = {"host": ("host", probes.copy_speed)}
    if sample is not None:
        wanted["storage"] = f"storage {sample.stat().st_dev} again", lambda: probes.read_speed(sample)
    if accelerators:
        wanted["link"] = f"link {accelerators[0]}", probes.link_speed
        wanted["device"] = f"device {accelerators[0]}", probes.device_speed
    given = _read(pinned or {})
    wanted = {name: probe for name, probe in wanted.items() if name not in given}
    kept = kept_or_measured(folder / FILE_NAME, dict(wanted.values()), is_sound=is_rate)
    found = {name: kept.get(key) for name, (key, _) in wanted.items()}
    return Rates(**{**{name: coarse_rate(speed) for name, speed in found.items() if speed}, **given})


def is_rate(figure: object) -> bool:
    """Return whether ``figure`` can be a rate of anything, in bytes a second."""
    return type(figure) is int and _LEAST <= figure <= _MOST


def coarse_rate(speed: int) -> int:
    """Return the nearest of 8 steps an octave: what is measured twice is nearly the same, and a plan's key exactly."""
    return round(2 ** (round(math.log2(speed) * _STEPS_AN_OCTAVE) / _STEPS_AN_OCTAVE))
