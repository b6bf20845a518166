"""From a device map, as the field writes it, to where each tensor lies."""

from __future__ import annotations

from collections.abc import Mapping

from offstage.pipeline.errors import ConfigError
from offstage.stages.empty_init.skeleton import Skeleton, longest_prefix
from offstage.stages.machine.devices import AnyDevice, device_id
from offstage.stages.units import DeviceId, tier


def homes_of(skeleton: Skeleton, device_map: Mapping[str, AnyDevice], *, otherwise: DeviceId) -> dict[str, DeviceId]:
    """Return where each tensor lies: on the device of its longest prefix in ``device_map``.

    Of the names of one tied tensor one suffices; where they disagree it lies on the fastest of their devices. A buffer
    that no state dict holds may be left out, and lies on the device ``otherwise``. Raises ``ConfigError`` for a tensor
    that the map leaves out.
    """
    devices = {name: device_id(device) for name, device in device_map.items()}
    homes: dict[str, DeviceId] = {}
    for spec in skeleton.tensors:
        prefixes = [longest_prefix(name, devices) for name in skeleton.names_of(spec.name)]
        covered = [devices[prefix] for prefix in prefixes if prefix is not None]
        if not covered and spec.persistent:
            raise ConfigError(f"device_map: leaves out {spec.name!r}; map it, or '' for all that is not mapped")
        homes[spec.name] = min(covered, key=tier, default=otherwise)
    return homes
