"""From a device map, as the field writes it, to where each tensor lies."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from pipeline.errors import ConfigError
from stages.dispatch.accelerate_api.align import AnyDevice, resolve_device
from stages.empty_init.skeleton import Skeleton, longest_prefix
from stages.shard_load.checkpoint_in_model import home_of
from stages.units import CPU, DISK, DeviceId, parse_device, tier

_log = logging.getLogger(__name__)


def device_id(device: AnyDevice) -> DeviceId:
    """Return the device id of ``device``: the index of an accelerator, whatever its kind is called."""
    try:
        return parse_device(device if isinstance(device, int) else str(device))
    except ValueError:
        kind = str(device).partition(":")[0]
        here = torch.accelerator.current_accelerator()
        if here is None or kind != here.type:
            raise
        return torch.device(device).index or 0


def homes_of(skeleton: Skeleton, device_map: Mapping[str, AnyDevice], *, otherwise: DeviceId) -> dict[str, DeviceId]:
    """Return where each tensor lies: on the device of its longest prefix in ``device_map``.

    Of the names of one tied tensor one suffices; where they disagree it lies on the fastest of their devices. A buffer
    that no state dict holds may be left out, and lies on the device ``otherwise``. Raises ``ConfigError`` for a tensor
    that the map leaves out.
    """
    devices = {name: device_id(device) for name, device in device_map.items()}
    homes: dict[str, DeviceId] = {}
    twins = {name: group for group in skeleton.tied for name in group}
    for spec in skeleton.tensors:
        names = twins.get(spec.name, (spec.name,))
        covered = [home_of(name, devices) for name in names if longest_prefix(name, devices) is not None]
        if not covered and spec.persistent:
            raise ConfigError(f"device_map: leaves out {spec.name!r}; map it, or '' for all that is not mapped")
        homes[spec.name] = min(covered, key=tier, default=otherwise)
    return homes


def warn_of_strangers(skeleton: Skeleton, device_map: Mapping[str, AnyDevice]) -> None:
    """Say in the log which names of the map are not in the model, and which of its devices are not here."""
    known = {spec.name for spec in skeleton.tensors} | {module.name for module in skeleton.modules}
    strangers = [name for name in device_map if name not in known]
    if strangers:
        _log.warning("device_map names nothing in the model: %s", ", ".join(strangers))
    for device in dict.fromkeys(device_map.values()):
        resolved = resolve_device(device) if str(device) != DISK else None
        if str(device) != CPU and resolved is not None and resolved.type == "cpu":
            _log.warning("device %s isn't here; it is simulated on the cpu", device)
