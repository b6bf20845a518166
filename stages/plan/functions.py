"""The field's planning functions, on any ``nn.Module``: names and signatures that scripts are written against.

They differ where today's behaviour hurts: a tied parameter counts once wherever it is bound, buffers are planned like
parameters, a reserve is kept only where something is streamed, a budget that can't hold its reserve is refused instead
of sending everything to disk, and no argument is ever changed. The order is that of registration: nothing is run.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from offstage.pipeline.errors import ConfigError, closest
from offstage.pipeline.typed_config import NO_DEVICE
from offstage.stages.machine.devices import device_id
from offstage.stages.machine.hardware import Hardware, local_accelerators
from offstage.stages.machine.host_memory import host_memory
from offstage.stages.plan import checks
from offstage.stages.plan.budgets import allow, size_of
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.module_sizes import Classes, outline_of
from offstage.stages.plan.placement import Budgets, fold, resident_bytes
from offstage.stages.plan.policies import POLICIES
from offstage.stages.plan.policies.explicit import spread
from offstage.stages.units import CPU, DISK, DeviceId, in_tier_order, parse_device, parse_size

Sizes = Mapping[int | str, int | str]

_log = logging.getLogger(__name__)


def get_max_memory(max_memory: Sizes | None = None) -> dict[DeviceId, int]:
    """Return what every device may hold, in bytes, in the order of the tiers.

    Sizes are read as ``offstage.stages.units.parse_size`` does. With None it is what this machine can give: the host by
    the smaller of available memory and the cgroup limit, less the process's own share and a margin. Accelerators that
    aren't here are accepted: a plan can be made for any machine.
    """
    if max_memory is None:
        budgets = allow(None, _machine()).budgets
        return {device: budget for device, budget in budgets.items() if budget is not None}
    if not isinstance(max_memory, Mapping):
        raise ConfigError(f"max_memory: {max_memory!r} {NO_DEVICE}")
    read = {parse_device(device): _parse(device, size) for device, size in max_memory.items()}
    return {device: read[device] for device in in_tier_order(read)}


def get_balanced_memory(
    model: nn.Module,
    max_memory: Sizes | None = None,
    no_split_module_classes: Classes = None,
    dtype: Any = None,
    special_dtypes: Mapping[str, Any] | None = None,
    low_zero: bool = False,
) -> dict[DeviceId, int]:
    """Return ``max_memory`` with the accelerators but the last lowered to their share of a balanced placement.

    ``infer_auto_device_map`` with the result gives that placement. With ``low_zero`` the first accelerator holds as
    little as it can.
    """
    budgets = get_max_memory(max_memory)
    outline = outline_of(model, no_split_module_classes, dtype=dtype, special_dtypes=special_dtypes)
    placement = POLICIES["balanced_low_0" if low_zero else "balanced"](outline, _with_disk(budgets))
    held, kept = resident_bytes(outline, placement.homes), lay_out(outline, placement).layer_reserves
    used = [device for device in budgets if isinstance(device, int) and budgets[device]]
    shares: dict[DeviceId, int] = {device: held.get(device, 0) + kept.get(device, 0) for device in used[:-1]}
    return {device: min(budget, shares.get(device, budget)) for device, budget in budgets.items()}


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Sizes | None = None,
    no_split_module_classes: Classes = None,
    dtype: Any = None,
    special_dtypes: Mapping[str, Any] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, DeviceId]:
    """Return the device map that fills the devices in order: module or tensor name → device id.

    A device that ``max_memory`` doesn't list holds nothing; disk is unlimited unless it is listed. With
    ``clean_result`` a module that lies on one device is one entry. ``offload_buffers`` and ``fallback_allocation``
    change nothing: buffers are always planned, and the reserve is never more than what is streamed needs. Raises
    ``BudgetError``, with the least budget that would work, where a device can't hold its reserve.
    """
    budgets = _with_disk(get_max_memory(max_memory))
    outline = outline_of(model, no_split_module_classes, dtype=dtype, special_dtypes=special_dtypes)
    placement = POLICIES["sequential"](outline, budgets)
    checks.require_fit(lay_out(outline, placement, budgets))
    if verbose:
        for device, count in resident_bytes(outline, placement.homes).items():
            _log.info("%s holds %d bytes", device, count)
    if clean_result:
        return fold(outline, placement.homes)
    return {layer.name: placement.homes[outline.skeleton.leader(layer.tensors[0])] for layer in outline.layers}


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` (a ``ValueError``) where ``device_map`` isn't one for ``model``.

    It is refused where it contradicts itself, leaves a tensor out (one that is tied to a tensor on the map isn't), or
    puts the names of one tied tensor on different devices. Names of nothing in the model are a ``UserWarning``.
    """
    outline = outline_of(model)
    devices = {name: device_id(device) for name, device in device_map.items()}
    strangers = [name for name in devices if name not in outline.names]
    if strangers:
        told = ", ".join(f"{name!r}{closest(name, outline.names)}" for name in strangers)
        warnings.warn(f"device_map keys do not match any submodules or tensors of the model: {told}", stacklevel=2)
    devices = {name: device for name, device in devices.items() if name in outline.names}
    checks.require_no_contradiction(outline, devices, "device_map")
    homes = spread(outline, devices)
    checks.require_complete(outline, homes, "device_map")
    checks.require_ties_together(outline, homes, "device_map")


def clean_device_map(device_map: Mapping[str, DeviceId], module_name: str = "") -> dict[str, DeviceId]:
    """Return ``device_map`` with the entries below ``module_name`` folded: one for modules whose entries all agree."""
    prefix = f"{module_name}." if module_name else ""
    inside = {name: device for name, device in device_map.items() if name.startswith(prefix) or name == module_name}
    if len(inside) > 1 and len(set(inside.values())) == 1:
        folded = {module_name: next(iter(inside.values()))}
        return {**{name: device for name, device in device_map.items() if name not in inside}, **folded}
    folded = dict(device_map)
    depth = prefix.count(".") + 1
    for child in dict.fromkeys(".".join(name.split(".")[:depth]) for name in inside if name != module_name):
        folded = clean_device_map(folded, child)
    return folded


def _machine() -> Hardware:
    return Hardware(local_accelerators(), host_memory())


def _parse(device: int | str, size: int | str) -> int:
    """Return ``size`` in bytes; a share is one of ``device``, which must be here."""
    is_share = isinstance(size, str) and size.strip().endswith("%")
    return parse_size(size, of=size_of(parse_device(device), _machine()) if is_share else None)


def _with_disk(budgets: Mapping[DeviceId, int]) -> Budgets:
    return {CPU: 0, DISK: None, **budgets}
