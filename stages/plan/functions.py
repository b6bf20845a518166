"""The field's planning functions, on any ``nn.Module``: names and signatures that scripts are written against.

They differ where today's behaviour hurts: a tied parameter counts once wherever it is bound, buffers are planned like
parameters, a reserve is kept only where something is streamed, a budget that can't hold its reserve is refused instead
of sending everything to disk, and no argument is ever changed. The order is that of registration: nothing is run.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from stages.checkpoints.dtypes import dtype_name
from stages.empty_init.describe import describe
from stages.empty_init.skeleton import TensorSpec
from stages.machine.hardware import Hardware, local_accelerators
from stages.machine.host_memory import host_memory
from stages.plan import checks
from stages.plan.budgets import allow
from stages.plan.outline import Outline
from stages.plan.placement import Budgets, fold, reserves, resident_bytes
from stages.plan.policies import POLICIES
from stages.plan.policies.explicit import spread
from stages.units import CPU, DISK, DTYPE_BYTES, DeviceId, in_tier_order, parse_device, parse_size

Sizes = Mapping[int | str, int | str]
Classes = str | Iterable[str] | None

_log = logging.getLogger(__name__)


def compute_module_sizes(
    model: nn.Module,
    dtype: Any = None,
    special_dtypes: Mapping[str, Any] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of every module, parameter and buffer by dotted name; ``""`` is the whole model.

    With ``dtype`` each tensor counts at the smaller of its own and that dtype, integers at their own; a dtype in
    ``special_dtypes``, by tensor name, wins. Within each module a tied tensor counts once. What has no tensors is 0.
    """
    outline = _outline(model, dtype=dtype, special_dtypes=special_dtypes)
    leader = outline.skeleton.leader
    sizes: dict[str, int] = defaultdict(int)
    counted: set[tuple[str, str]] = set()
    for tensor in outline.skeleton.tensors:
        if buffers_only and tensor.kind != "buffer":
            continue
        parts = tensor.name.split(".")
        for name in ["", *(".".join(parts[:count]) for count in range(1, len(parts) + 1))]:
            if (name, leader(tensor.name)) not in counted:
                counted.add((name, leader(tensor.name)))
                sizes[name] += outline.sizes[tensor.name]
    return sizes


def get_max_layer_size(
    modules: Sequence[tuple[str, Any]], module_sizes: Mapping[str, int], no_split_module_classes: Sequence[str]
) -> tuple[int, list[str]]:
    """Return the bytes of the largest layer among ``modules`` (pairs of name and module), and the names that have it.

    A layer is what is never split: a module of one of ``no_split_module_classes``, or one without children.
    """
    layers = dict(_layers(modules, set(no_split_module_classes)))
    largest = max((module_sizes[name] for name in layers), default=0)
    return largest, [name for name in layers if module_sizes[name] == largest]


def _layers(modules: Iterable[tuple[str, Any]], no_split: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield those of ``modules``, and of the modules in them, that are never split, in order."""
    for name, module in modules:
        children = dict(module.named_children()) if isinstance(module, nn.Module) else {}
        if children and type(module).__name__ not in no_split:
            inner = ((f"{name}.{child}" if name else child, below) for child, below in children.items())
            yield from _layers(inner, no_split)
        else:
            yield name, module


def get_max_memory(max_memory: Sizes | None = None) -> dict[DeviceId, int]:
    """Return what every device may hold, in bytes, in the order of the tiers.

    Sizes are read as ``stages.units.parse_size`` does. With None it is what this machine can give: the host by the
    smaller of available memory and the cgroup limit, less the process's own share and a margin. Accelerators that
    aren't here are accepted: a plan can be made for any machine.
    """
    if max_memory is None:
        budgets = allow(None, _machine()).budgets
        return {device: budget for device, budget in budgets.items() if budget is not None}
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
    outline = _outline(model, no_split_module_classes, dtype=dtype, special_dtypes=special_dtypes)
    placement = POLICIES["balanced_low_0" if low_zero else "balanced"](outline, _with_disk(budgets))
    held, kept = resident_bytes(outline, placement.homes), reserves(outline, placement)
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
    outline = _outline(model, no_split_module_classes, dtype=dtype, special_dtypes=special_dtypes)
    placement = POLICIES["sequential"](outline, budgets)
    checks.require_fit(outline, placement, budgets)
    if verbose:
        for device, count in resident_bytes(outline, placement.homes).items():
            _log.info("%s holds %d bytes", device, count)
    if clean_result:
        return fold(outline, placement.homes)
    return {layer.name: placement.homes[outline.skeleton.leader(layer.tensors[0])] for layer in outline.layers}


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` (a ``ValueError``) where ``device_map`` isn't one for ``model``.

    It is refused where it names nothing in the model, contradicts itself, leaves a tensor out, or puts the names of
    one tied tensor on different devices.
    """
    outline = _outline(model)
    devices = {
        name: parse_device(device if isinstance(device, int) else str(device)) for name, device in device_map.items()
    }
    checks.require_known_names(outline, devices, "device_map")
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


def _outline(
    model: nn.Module, no_split: Classes = (), *, dtype: Any = None, special_dtypes: Mapping[str, Any] | None = None
) -> Outline:
    """Return the outline of ``model`` in the order of registration, its tensors at the dtypes asked for."""
    classes = [no_split] if isinstance(no_split, str) else list(no_split or ())
    skeleton = describe(model, no_split=classes, rehearsed=False)
    special = {name: _dtype(value) for name, value in (special_dtypes or {}).items()}
    wanted = None if dtype is None else _dtype(dtype)
    tensors = tuple(_cast(tensor, wanted, special.get(tensor.name)) for tensor in skeleton.tensors)
    return Outline(replace(skeleton, tensors=tensors))


def _cast(tensor: TensorSpec, wanted: str | None, special: str | None) -> TensorSpec:
    """Return ``tensor`` at its special dtype, or at the smaller of its own and the wanted one if it isn't integral."""
    if special is not None:
        return replace(tensor, dtype=special)
    integral = tensor.dtype.startswith(("int", "uint", "bool"))
    if wanted is None or integral or DTYPE_BYTES[tensor.dtype] <= DTYPE_BYTES[wanted]:
        return tensor
    return replace(tensor, dtype=wanted)


def _dtype(value: Any) -> str:
    """Return the name of a dtype that is given as torch's, by name, or as an enum of names."""
    name = dtype_name(getattr(value, "value", value))
    if name not in DTYPE_BYTES:
        raise ValueError(f"{value!r} is not a dtype; accepted: {', '.join(DTYPE_BYTES)}")
    return name


def _machine() -> Hardware:
    return Hardware(local_accelerators(), host_memory())


def _parse(device: int | str, size: int | str) -> int:
    if isinstance(size, str) and size.strip().endswith("%"):
        return _share(parse_device(device), size)
    return parse_size(size)


def _share(device: DeviceId, size: str) -> int:
    """Return the bytes of a share of ``device``, which must be here."""
    machine = _machine()
    if isinstance(device, int) and device < len(machine.accelerators):
        return parse_size(size, of=machine.accelerators[device].total_bytes)
    return parse_size(size, of=machine.host.total_bytes if device == CPU else None)


def _with_disk(budgets: Mapping[DeviceId, int]) -> Budgets:
    return {CPU: 0, DISK: None, **budgets}
