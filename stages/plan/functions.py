"""The field's planning functions, on any ``nn.Module``: what its modules weigh, and device maps for it.

Names and signatures are those that scripts are written against. They differ where today's behaviour hurts: a tied
parameter counts once wherever it is bound, buffers are planned like parameters, a reserve is kept only where something
is streamed, a budget that can't hold its reserve is refused instead of sending everything to disk, and no argument is
ever changed. The order is that of registration: nothing is run.
"""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from offstage.pipeline.cache import user_cache
from offstage.pipeline.errors import ConfigError, closest
from offstage.pipeline.kept_memory import keep_little
from offstage.pipeline.stage import MEASURED
from offstage.pipeline.typed_config import NO_DEVICE
from offstage.stages.checkpoints.dtypes import dtype_name
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.skeleton import longest_prefix, upward
from offstage.stages.machine.devices import device_id
from offstage.stages.machine.hardware import Hardware, local_accelerators
from offstage.stages.machine.host_memory import host_memory
from offstage.stages.machine.kernels import local_kernels
from offstage.stages.plan import checks
from offstage.stages.plan.budgets import allow, size_of
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.memory_needs import memory_needs
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Budgets, Homes, all_homes, fold, resident_bytes
from offstage.stages.plan.policies import POLICIES
from offstage.stages.plan.policies.explicit import explicit
from offstage.stages.plan.policies.optimal import Search
from offstage.stages.plan.request.geometry import Request, geometry_of
from offstage.stages.units import CPU, DISK, DTYPE_BYTES, DeviceId, in_tier_order, parse_device, parse_size

Classes = str | Iterable[str] | None
Sizes = Mapping[int | str, int | str]

REQUEST = Request(sequences=1, prompt=256, length=512)
"""What a budget that is worked out leaves room for where nobody says what will be asked of the model."""

_UNLISTED: dict[DeviceId, int | None] = {CPU: 0, DISK: None}
"""What devices may hold that no budget is given for."""

_log = logging.getLogger(__name__)


def get_max_memory(max_memory: Sizes | None = None) -> dict[DeviceId, int]:
    """Return what every device may hold, in bytes, in the order of the tiers.

    Sizes are read as ``offstage.stages.units.parse_size`` does. With None it is what this machine can give: the host by
    the smaller of available memory and the cgroup limit, less the process's own share and a margin. Accelerators that
    aren't here are accepted: a plan can be made for any machine.

    >>> get_max_memory({"cpu": "2GB", 0: "1GiB"})
    {0: 1073741824, 'cpu': 2000000000}
    """
    machine = Hardware(local_accelerators(), host_memory())
    if max_memory is None:
        budgets = allow(None, machine).budgets
        return {device: budget for device, budget in budgets.items() if budget is not None}
    if not isinstance(max_memory, Mapping):
        raise ConfigError(f"max_memory: {max_memory!r} {NO_DEVICE}")
    read = {}
    for name, size in max_memory.items():
        device = parse_device(name)
        is_share = isinstance(size, str) and size.strip().endswith("%")  # of a device that must be here
        read[device] = parse_size(size, of=size_of(device, machine) if is_share else None)
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

    >>> model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(4)))
    >>> get_balanced_memory(model, {0: "1MB", 1: "1MB", "cpu": "1MB"})
    {0: 80800, 1: 1000000, 'cpu': 1000000}
    """
    budgets = get_max_memory(max_memory)
    outline = outline_of(model, no_split_module_classes, dtype=dtype, special_dtypes=special_dtypes)
    placement = POLICIES["balanced_low_0" if low_zero else "balanced"](outline, _UNLISTED | budgets)
    resident, reserves = resident_bytes(outline, placement.homes), lay_out(outline, placement).layer_reserves
    used = [device for device in budgets if isinstance(device, int) and budgets[device]]
    shares: dict[DeviceId, int] = {device: resident.get(device, 0) + reserves.get(device, 0) for device in used[:-1]}
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
    ``clean_result`` a module that lies on one device is one entry. Maps are accelerate's, but where that keeps room
    that nothing is streamed into: on the host too where the disk holds something, and for a layer that is resident.
    And of a module of which a tensor is tied, accelerate moves the others too. ``offload_buffers`` and
    ``fallback_allocation`` change nothing: buffers are always planned, and the reserve is never more than what is
    streamed needs. Raises ``BudgetError``, with the least budget that would work, where a device can't hold its
    reserve.

    >>> model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(3)))
    >>> infer_auto_device_map(model, {0: "90kB", "cpu": "1MB"})
    {'0': 0, '1': 'cpu', '2': 'cpu'}
    """
    budgets = _UNLISTED | get_max_memory(max_memory)
    outline = outline_of(model, no_split_module_classes, dtype=dtype, special_dtypes=special_dtypes)
    homes = _homes(outline, "sequential", budgets)
    if verbose:
        for device, count in resident_bytes(outline, homes).items():
            _log.info("%s holds %d bytes", device, count)
    if clean_result:
        return _with_empty_modules(model, fold(all_homes(outline, homes)))
    return {layer.name: homes[outline.skeleton.leader(layer.tensors[0])] for layer in outline.layers}


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` (a ``ValueError``) where ``device_map`` isn't one for ``model``.

    It is refused where it contradicts itself, leaves a tensor out (one that is tied to a tensor on the map isn't), or
    puts the names of one tied tensor on different devices. Names of nothing in the model are a ``UserWarning``.

    >>> check_device_map(nn.Linear(2, 2), {"weight": 0})
    Traceback (most recent call last):
        ...
    offstage.pipeline.errors.ConfigError: device_map: no entry covers 'bias'; add 'bias', ...
    """
    outline = outline_of(model)
    devices = {name: device_id(device) for name, device in device_map.items()}
    strangers = [name for name in devices if name not in outline.names]
    if strangers:
        names = ", ".join(f"{name!r}{closest(name, outline.names)}" for name in strangers)
        warnings.warn(f"device_map keys do not match any submodules or tensors of the model: {names}", stacklevel=2)
    explicit(outline, {name: device for name, device in devices.items() if name in outline.names})


def map_by_policy(
    model: nn.Module, policy: str, *, max_memory: Sizes | None, no_split: Classes, dtype: Any
) -> tuple[dict[str, DeviceId], Budgets]:
    """Return the map that ``policy`` makes for ``model``, and the budgets that it keeps to, in bytes.

    Without ``max_memory`` these are what the machine can give, its cgroups included, less what ``REQUEST`` takes.
    Raises ``ConfigError`` for a policy that there isn't, ``BudgetError``, with the least that would work, for budgets
    that can't hold the plan.
    """
    if policy not in POLICIES:
        near = closest(policy, POLICIES)
        raise ConfigError(f"device_map: {policy!r} is no policy{near}; give one of {', '.join(POLICIES)}, or a map")
    classes = getattr(model, "_no_split_modules", None) if no_split is None else no_split
    outline = replace(outline_of(model, classes, dtype=dtype), gathers=True, routes=True)
    budgets: Budgets = {**_UNLISTED, **(get_max_memory(max_memory) if max_memory else _free(model, outline))}
    return fold(all_homes(outline, _homes(outline, policy, budgets))), budgets


def clean_device_map(device_map: Mapping[str, DeviceId], module_name: str = "") -> dict[str, DeviceId]:
    """Return ``device_map`` with the entries below ``module_name`` folded: one for modules whose entries all agree.

    >>> clean_device_map({"a.0": 0, "a.1": 0, "b": "cpu"})
    {'b': 'cpu', 'a': 0}
    """
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


def _with_empty_modules(model: nn.Module, device_map: dict[str, DeviceId]) -> dict[str, DeviceId]:
    """Return ``device_map`` with the modules without a tensor that lie below none of its entries, a dropout between
    two of them, each where lies what is registered before it.
    """
    entries, last = dict(device_map), next(iter(device_map.values()), CPU)
    for name, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        entry = longest_prefix(f"{name}.{own[-1][0]}".lstrip(".") if own else name, device_map)
        if entry is not None:
            last = device_map[entry] if own else last
        elif name and not own and not any(module.children()):
            entries[name] = last
    return entries


def _homes(outline: Outline, policy: str, budgets: Budgets) -> Homes:
    """Return where ``policy`` has every tensor lie. Raises ``BudgetError`` where a device can't hold its reserve.

    A map has a module compute where it lies, or on the main device: it can't say more of what is streamed.
    """
    placement = Search(links=1).optimal(outline, budgets) if policy == "optimal" else POLICIES[policy](outline, budgets)
    checks.require_fit(lay_out(outline, placement, budgets))
    return placement.homes


def _free(model: nn.Module, outline: Outline) -> Budgets:
    """Return what this machine can give to weights beside ``REQUEST``, as a run works it out: the model is rehearsed.

    It changes how the C library gives memory back and how many compiled kernels are kept, which the figures of the
    machine's kernels rely on.
    """
    keep_little()
    config: Any = getattr(model, "config", None)
    shape: Mapping[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    rehearsed = describe(model, no_split=outline.skeleton.no_split)
    weighed = {name: getattr(rehearsed, name) for name in ("moments", "caches", "decoding")}
    forward = Outline(replace(outline.skeleton, **weighed))
    needs = memory_needs(forward, geometry_of(shape), REQUEST, local_kernels(user_cache() / MEASURED))
    return allow(None, Hardware(local_accelerators(), host_memory()), needed=needs.bytes).budgets


def compute_module_sizes(
    model: nn.Module,
    dtype: Any = None,
    special_dtypes: Mapping[str, Any] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of every module, parameter and buffer by dotted name; ``""`` is the whole model.

    With ``dtype`` each tensor counts at the smaller of its own and that dtype, integers at their own; a dtype in
    ``special_dtypes``, by tensor name, wins. Within each module a tied tensor counts once. What has no tensors is 0.

    >>> sizes = compute_module_sizes(nn.Sequential(nn.Linear(100, 100)), dtype="float16")
    >>> sizes[""], sizes["0.bias"]
    (20200, 200)
    """
    outline = outline_of(model, dtype=dtype, special_dtypes=special_dtypes)
    leader = outline.skeleton.leader
    sizes: dict[str, int] = defaultdict(int)
    counted: set[tuple[str, str]] = set()
    for tensor in outline.skeleton.tensors:
        if buffers_only and tensor.kind != "buffer":
            continue
        for name in upward(tensor.name):
            if (name, leader(tensor.name)) not in counted:
                counted.add((name, leader(tensor.name)))
                sizes[name] += outline.sizes[tensor.name]
    return sizes


def get_max_layer_size(
    modules: Sequence[tuple[str, Any]], module_sizes: Mapping[str, int], no_split_module_classes: Sequence[str]
) -> tuple[int, list[str]]:
    """Return the bytes of the largest layer among ``modules`` (pairs of name and module), and the names that have it.

    A layer is what is never split: a module of one of ``no_split_module_classes``, or one without children.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    >>> get_max_layer_size(list(model.named_children()), compute_module_sizes(model), [])
    (288, ['0'])
    """
    layers = dict(_layers(modules, set(no_split_module_classes)))
    largest = max((module_sizes[name] for name in layers), default=0)
    return largest, [name for name in layers if module_sizes[name] == largest]


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of ``model``, and those of its largest layer with the names of the layers that have them.

    A layer is never split: see ``get_max_layer_size``; the classes are those that a transformers model declares.

    >>> calculate_maximum_sizes(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
    (360, (288, ['0']))
    """
    sizes = compute_module_sizes(model)
    pieces = [*model.named_parameters(recurse=False), *model.named_children(), *model.named_buffers(recurse=False)]
    return sizes[""], get_max_layer_size(pieces, sizes, list(getattr(model, "_no_split_modules", None) or ()))


def _layers(modules: Iterable[tuple[str, Any]], no_split: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield those of ``modules``, and of the modules in them, that are never split, in order."""
    for name, module in modules:
        children = dict(module.named_children()) if isinstance(module, nn.Module) else {}
        if children and type(module).__name__ not in no_split:
            inner = ((f"{name}.{child}" if name else child, below) for child, below in children.items())
            yield from _layers(inner, no_split)
        else:
            yield name, module


def outline_of(
    model: nn.Module, no_split: Classes = (), *, dtype: Any = None, special_dtypes: Mapping[str, Any] | None = None
) -> Outline:
    """Return the outline of ``model`` in the order of registration, its tensors at the dtypes asked for."""
    classes = [no_split] if isinstance(no_split, str) else list(no_split or ())
    skeleton = describe(model, no_split=classes, rehearsed=False)
    special = {name: _dtype(value) for name, value in (special_dtypes or {}).items()}
    wanted = None if dtype is None else _dtype(dtype)
    tensors = []
    for spec in skeleton.tensors:
        integral = spec.dtype.startswith(("int", "uint", "bool"))
        narrower = wanted if wanted and not integral and DTYPE_BYTES[wanted] < DTYPE_BYTES[spec.dtype] else spec.dtype
        tensors.append(replace(spec, dtype=special.get(spec.name, narrower)))
    return Outline(replace(skeleton, tensors=tuple(tensors)), gathers=False, routes=False)


def _dtype(value: object) -> str:
    """Return the name of a dtype that is given as torch's, by name, or as an enum of names."""
    name = dtype_name(getattr(value, "value", value))
    if name not in DTYPE_BYTES:
        raise ValueError(f"{value!r} is not a dtype; accepted: {', '.join(DTYPE_BYTES)}")
    return name
