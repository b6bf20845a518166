"""What is odd about a device map, said in the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from offstage.stages.dispatch.accelerate_api.align import resolve_device
from offstage.stages.empty_init.skeleton import Skeleton
from offstage.stages.machine.devices import AnyDevice
from offstage.stages.units import CPU, DISK

_log = logging.getLogger(__name__)


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
