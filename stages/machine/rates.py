"""How fast the machine moves bytes: given by the config, or measured once and kept beside the cache.

Decoding one token reads every weight once and does little else, so the bytes a second of each place that weights lie in
say how long a token takes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from offstage.stages.machine import decoding_probe, probes, product_probe
from offstage.stages.machine.decoding_probe import narrow_speed
from offstage.stages.machine.kept_figures import kept_speeds
from offstage.stages.machine.kernels import identity
from offstage.stages.machine.own_process import measure_apart, measure_together
from offstage.stages.machine.product_probe import OF_FILES, HostWeights, Shape, kept_as, memory_bytes, named
from offstage.stages.units import DeviceId, parse_size

_log = logging.getLogger("offstage")

FILE_NAME = "rates.json"
DECODING_NAME = "decoding.json"
_NO_SHAPES: Mapping[Shape, float] = MappingProxyType({})
_STEPS_AN_OCTAVE = 16


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second of storage, host memory, the link of each accelerator, and an accelerator's memory.

    ``host`` is how fast its products read weights, ``calls`` how many modules that hold weights are called there in a
    second, for all that these take beside reading, and ``loops`` how many tokens come around in a second, for all that
    one takes beside its calls: what a model does once for it, and choosing it. ``dequantising`` is how fast the threads
    that read unpack together what rests packed, in bytes as they are used. ``launches`` is how many modules that hold
    weights are called in a second where an accelerator computes them: what the host does to have that done, however
    small they are.
    ``multiplying`` is how fast products read weights that they multiply quantised, as these rest; null: as others.
    ``root`` is what all links bring together, where they share one; null: each brings what it can.
    ``apart`` has the rates of each accelerator's own link and memory, by their names, where they are unlike; empty: all
    are as ``host_to_device`` and ``device`` say. ``disturbed`` says that others computed while one was measured.
    """

    storage: int = 10**9
    host: int = 10 * 10**9
    host_to_device: int = 12 * 10**9
    device: int = 800 * 10**9
    dequantising: int = 4 * 10**9
    calls: int = 15_000
    loops: int = 700
    launches: int = 8_000
    multiplying: int | None = None
    root: int | None = None
    apart: Mapping[DeviceId, Mapping[str, int]] = field(default_factory=dict, hash=False)
    disturbed: bool = field(default=False, compare=False)

    def link_of(self, device: DeviceId) -> int:
        """Return what the link of ``device`` brings; ``host_to_device`` where it has none of its own."""
        return self.apart.get(device, {}).get("host_to_device", self.host_to_device)

    def device_of(self, device: DeviceId) -> int:
        """Return how fast the memory of ``device`` is read; ``device`` where it has no rate of its own."""
        return self.apart.get(device, {}).get("device", self.device)

    @property
    def slowest_link(self) -> int:
        """What the slowest link brings."""
        return min(map(self.link_of, self.apart), default=self.host_to_device)

    @property
    def shared(self) -> dict[str, int]:
        """Those of the machine, by name, but for a root that there isn't."""
        return {name: getattr(self, name) for name in RATES if getattr(self, name) is not None}


RATES = tuple(each.name for each in fields(Rates) if each.compare and each.name != "apart")
"""The rates of a machine, by name."""
OPTIONAL_RATES = tuple(each.name for each in fields(Rates) if each.default is None)
"""Those that may be null."""
DEVICE_RATES = ("host_to_device", "device")
"""Those that an accelerator may have of its own."""


def read_rates(hardware: Mapping[str, Any]) -> Rates:
    """Return the rates that ``hardware`` gives (``rates: {storage: 3GB, host_to_device: 25GB}``), or nominal ones.

    A device of ``hardware.devices`` may have ``rates`` of its own, and its ``host_to_device`` beside them.
    """
    shared = replace(Rates(), **_read(hardware.get("rates") or {}))
    own = [_own_rates(device) for device in hardware.get("devices") or ()]
    if not any(own):
        return shared
    all_alike = {name: getattr(shared, name) for name in DEVICE_RATES}
    return replace(shared, apart={index: {**all_alike, **rates} for index, rates in enumerate(own)})


def _own_rates(device: Mapping[str, Any]) -> dict[str, int]:
    rates = device.get("rates") or {}
    return _read({**rates, "host_to_device": device.get("host_to_device") or rates.get("host_to_device")})


def _read(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: parse_rate(speed) for name, speed in given.items() if speed is not None}


def parse_rate(value: int | str) -> int:
    """Return ``value``, written as a size, as how much a second; a ``ValueError`` for what isn't at least 1."""
    speed = parse_size(value)
    if speed < 1:
        raise ValueError(f"{value!r} is no speed; give 1 or more a second, or leave it out to have it measured")
    return speed


def local_rates(
    folder: Path,
    sample: Path | None,
    accelerators: Sequence[str] = (),
    *,
    pinned: Mapping[str, Any] | None = None,
    light: bool = False,
    weights: HostWeights = OF_FILES,
    read: Mapping[Shape, float] = _NO_SHAPES,
) -> Rates:
    """Return this machine's rates, coarsely: those kept in ``folder``, or measured now and kept there.

    ``sample`` is a large file on the storage in question (a shard of the checkpoint); each file system has a rate
    of its own. ``accelerators`` are the names of those that are here; the first one's link and memory are measured, and
    how fast it is given work. What can't be measured keeps its nominal value; those that are ``pinned`` (``{storage:
    3GB}``) aren't measured, nor are loops where calls needn't be. For a ``light`` model, whose tokens are calls and
    little else, how many of them the host makes is measured in a moment, and how fast it reads is nominal; that of
    others is how fast it reads such ``weights``, of which so many bytes are ``read`` by shape.
    """
    given, found = _read(pinned or {}), list[tuple[dict[str, int], bool]]()
    if sample is not None and "storage" not in given:
        keys = {"storage": f"storage {sample.stat().st_dev} past caches"}
        found.append(kept_speeds(folder, FILE_NAME, keys, lambda _: {"storage": probes.read_speed(sample)}))
    if lacking := [name for name in (*DEVICE_RATES, "launches") if accelerators and name not in given]:
        keys = {name: f"{name} {accelerators[0]}" for name in lacking}
        found.append(kept_speeds(folder, FILE_NAME, keys, lambda _: measure_apart("machine.probes") or {}))
    if not given.keys() >= ({"calls"} if light else {"host", "calls"}):
        found.append(light_rates(folder) if light else host_rates(folder, weights, {} if "host" in given else read))
    speeds = {name: coarse_rate(speed) for figures, _ in found for name, speed in figures.items() if speed}
    return replace(Rates(), **{**speeds, **given, "disturbed": any(disturbed for _, disturbed in found)})


def host_rates(folder: Path, weights: HostWeights, read: Mapping[Shape, float]) -> tuple[dict[str, int], bool]:
    """Return how fast the host decodes with such ``weights``, by name: as ``folder`` or this user keeps it, or as it is
    measured now, in one process for all that isn't kept; and whether others disturbed it.

    It hangs on what chooses the kernels, and on how many threads run them. So many bytes are ``read`` by shape: by what
    products read of each the host reads all of them; where nothing is said of shapes, as a decoder of its own does.
    None where it can't be measured.
    """
    decoder = f"decoder of {weights.name}; {identity()}"
    keys: dict[Shape | None, str] = {None: decoder, **{shape: kept_as(shape, weights) for shape in read}}
    figures, disturbed = kept_speeds(folder, DECODING_NAME, keys, partial(_measured_apart, weights), of_user=True)
    rates = dict(figures.get(None, {}))
    if read and figures.keys() >= read.keys():
        rates["host"] = round(sum(read.values()) / sum(count / figures[shape] for shape, count in read.items()))
    return rates, disturbed


def _measured_apart(weights: HostWeights, lacking: Collection[Shape | None]) -> dict[Shape | None, Any]:
    """Return the figures of products of the shapes that are ``lacking``, and where null is among them those of a
    decoder, by all of these.
    """
    _log.info("measures how fast the host decodes, once for this processor and torch: a few seconds")
    shapes = [shape for shape in lacking if shape is not None]
    asked = [decoding_probe.question(weights)] * (None in lacking)
    asked += [product_probe.question(weights, shapes)] * bool(shapes)
    answers = measure_together(asked, beside=memory_bytes() * 5 // 4)
    speeds = (answers[-1] if shapes else None) or {}
    return {None: answers[0] if None in lacking else None, **{shape: speeds.get(named(shape)) for shape in shapes}}


def light_rates(folder: Path) -> tuple[dict[str, int], bool]:
    """Return how many ``calls`` and ``loops`` the host makes in decoding with a narrow model: as kept, or measured in
    this process.

    They are beside what it reads by the nominal rate. Such a model takes no memory to speak of, and what it imports the
    run imports too.
    """
    key = f"narrow decoder beside reading; {identity()}"
    figures, disturbed = kept_speeds(
        folder, DECODING_NAME, {"narrow": key}, lambda _: {"narrow": narrow_speed(Rates().host)}, of_user=True
    )
    return dict(figures.get("narrow", {})), disturbed


def coarse_rate(speed: int) -> int:
    """Return the nearest of 16 steps an octave: what is measured twice is nearly the same, and a plan's key exactly."""
    return round(2 ** (round(math.log2(speed) * _STEPS_AN_OCTAVE) / _STEPS_AN_OCTAVE))
