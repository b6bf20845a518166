"""What callers from Python give, as a config has it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from offstage.stages.machine.hardware import local_accelerators
from offstage.stages.units import CPU

_TORCH_S_OWN = "cuda"
"""How torch names an accelerator where only one is meant."""


def as_list(given: Any) -> Any:
    """Return a sequence as the list that a config has in its place."""
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else given


def as_text(value: Any) -> Any:
    """Return a path as text."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def as_budgets(max_memory: Any, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the budgets as a config has them; one size is that of the device that computes."""
    if max_memory is None or isinstance(max_memory, Mapping):
        return {str(device): str(size) for device, size in (max_memory or {}).items()}
    described = options.get("hardware")
    listed = described.get("devices") if isinstance(described, Mapping) else None
    accelerators = local_accelerators() if listed is None else listed
    return {"0" if accelerators else str(CPU): str(max_memory)}


def as_device_map(device_map: Any) -> Any:
    """Return the map, or what makes it, as a config has it; one device may be torch's."""
    if isinstance(device_map, Mapping):
        return {str(name): _as_device(device) for name, device in device_map.items()}
    is_name = isinstance(device_map, str) and device_map != _TORCH_S_OWN
    return device_map if is_name or device_map is None else _as_device(device_map)


def _as_device(device: Any) -> Any:
    """Return a device id as a config has it; torch's default accelerator is the first."""
    if isinstance(device, (int, float)):
        return device
    return 0 if str(device) == _TORCH_S_OWN else str(device)
