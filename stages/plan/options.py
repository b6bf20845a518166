"""The config keys of the plan, read and checked: ``device_map``, ``device_map_overrides``, ``max_memory``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from offstage.pipeline.errors import ConfigError, Fault, closest
from offstage.pipeline.regular_files import read_json
from offstage.pipeline.typed_config import KEYS, PATHS, Device, absolute, expanded
from offstage.stages.machine.hardware_faults import hardware_faults
from offstage.stages.plan.plan import EXPLICIT, OFFLOAD
from offstage.stages.plan.policies import POLICIES
from offstage.stages.units import DeviceId, parse_device, parse_size

FASTEST = "fastest"
"""The ``execution`` by which layers may compute on the host, where they lie, if that is predicted to be faster."""
_ANY_SIZE = 1 << 40
"""Stands for the size of a device where only the notation of a share of it is checked."""


def _located(choice: str) -> str:
    """Return a ``device_map`` that is text with its path absolute, where it is one."""
    return absolute(choice) if _is_path(choice) else choice


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """How what is streamed from disk is read, and whether it rests there packed."""

    io: Literal["auto", "direct", "mmap"] = "auto"
    codec: Literal["none", "zstd", "auto"] = "none"


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """What the devices may hold, what goes where, and on which machine."""

    max_memory: Mapping[str, str] | None = field(default_factory=dict, metadata={KEYS: Device})
    device_map: Any = field(default="optimal", metadata={PATHS: {"": _located}})
    device_map_overrides: Mapping[str, Any] | None = field(default_factory=dict)
    execution: Literal["exact", "fastest"] = "exact"
    storage: StorageConfig = StorageConfig()
    hardware: Mapping[str, Any] | None = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Choice:
    """What ``device_map`` says: the name of a policy, or ``explicit`` with the map's entries (name → device).

    ``gigabytes`` is the N of ``cpu_offload_gb: N``, which is written as a map with that one key.
    """

    policy: str
    entries: Mapping[str, DeviceId] = field(default_factory=dict)
    gigabytes: float = 0.0


def faults(given: PlanConfig) -> Iterator[Fault]:
    """Yield what is wrong with the plan's keys, as far as neither the model nor the machine must be known."""
    for device, size in (given.max_memory or {}).items():
        yield from _fault(f"max_memory.{device}", lambda device=device: parse_device(device))
        yield from _fault(f"max_memory.{device}", lambda size=size: parse_size(size, of=_ANY_SIZE))
    yield from _map_faults("device_map", given.device_map)
    for name, device in (given.device_map_overrides or {}).items():
        yield from _fault(f"device_map_overrides.{name}", lambda device=device: parse_device(device))
    if given.execution == FASTEST and given.device_map != "optimal":
        shown = "a map" if isinstance(given.device_map, Mapping) else repr(given.device_map)
        yield Fault(
            "execution",
            f"{FASTEST!r} is for device_map=optimal, which then chooses what computes on the host, and device_map is "
            f"{shown}; take optimal, or execution=exact",
        )
    yield from hardware_faults(given.hardware or {})
    if given.storage.codec == "zstd" and given.storage.io == "mmap":
        yield Fault("storage.codec", "'zstd' is of no use in a map of a file; set storage.io=direct, or take 'none'")


def _fault(key: str, parse: Any) -> Iterator[Fault]:
    try:
        parse()
    except ValueError as error:
        yield Fault(key, str(error))


def _map_faults(key: str, value: object) -> Iterator[Fault]:
    if isinstance(value, Mapping):
        yield from _entry_faults(key, value)
    elif isinstance(value, str) and _is_path(value):
        yield from _file_faults(key, value)
    elif not (isinstance(value, str) and value in POLICIES) and not _is_device(value):
        near = closest(str(value), POLICIES)
        yield Fault(
            key,
            f"{value!r} is no policy{near}; give one of {', '.join(POLICIES)}, {{{OFFLOAD}: N}}, a map of module names"
            " to devices, the path of a device_map.json, or one device",
        )


def _entry_faults(key: str, entries: Mapping[object, object]) -> Iterator[Fault]:
    if not entries:
        yield Fault(key, "the map is empty; give module names and devices, or the name of a policy")
    if set(entries) == {OFFLOAD} and not _is_amount(entries[OFFLOAD]):
        yield Fault(f"{key}.{OFFLOAD}", f"{entries[OFFLOAD]!r} is no number of gigabytes; give one from 0 up")
    devices = {} if set(entries) == {OFFLOAD} else entries
    for name, device in devices.items():
        yield from _fault(f"{key}.{name}", lambda device=device: parse_device(device))


def _file_faults(key: str, given: str) -> Iterator[Fault]:
    try:
        path = expanded(given)
    except ConfigError as error:
        yield Fault(key, str(error))
        return
    try:
        content = read_json(path)
    except OSError as error:
        yield Fault(key, f"{str(path)!r} can't be read ({error.strerror}); give the path of a device_map.json")
        return
    except ValueError as error:
        yield Fault(key, f"{str(path)!r} is no JSON file ({error}); give the path of a device_map.json")
        return
    if isinstance(content, dict):
        yield from _map_faults(key, content)
    else:
        yield Fault(key, f"{str(path)!r} holds no map; give a JSON object of module names and devices")


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_path(value: str) -> bool:
    return value.endswith(".json") or "/" in value or "\\" in value


def _is_device(value: object) -> bool:
    return not list(_fault("", lambda: parse_device(value)))


def read_choice(value: Any) -> Choice:
    """Return what the key ``device_map``, found faultless, says. A file's content stands for its path."""
    if isinstance(value, str) and _is_path(value):
        value = read_json(expanded(value))
    if isinstance(value, Mapping) and set(value) == {OFFLOAD}:
        return Choice(OFFLOAD, gigabytes=float(value[OFFLOAD]))
    if isinstance(value, Mapping):
        return Choice(EXPLICIT, {str(name): parse_device(device) for name, device in value.items()})
    if isinstance(value, str) and value in POLICIES:
        return Choice(value)
    return Choice(EXPLICIT, {"": parse_device(value)})


def read_overrides(value: Mapping[str, Any] | None) -> dict[str, DeviceId]:
    """Return the entries of the key ``device_map_overrides``."""
    return {str(name): parse_device(device) for name, device in (value or {}).items()}
