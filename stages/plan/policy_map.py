"""The device map that a policy makes for a model that is in memory: what a run's plan would be, from Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from offstage.pipeline.cache.user_cache import user_cache
from offstage.pipeline.errors import ConfigError, closest
from offstage.pipeline.kernel_caches import bound_kernel_caches
from offstage.pipeline.malloc import return_freed_memory
from offstage.pipeline.stage import MEASURED
from offstage.stages.empty_init.describe import describe
from offstage.stages.machine.hardware import Hardware, local_accelerators
from offstage.stages.machine.host_memory import host_memory
from offstage.stages.machine.kernels import local_kernels
from offstage.stages.plan.budgets import allow
from offstage.stages.plan.checks import require_fit
from offstage.stages.plan.functions import Sizes, get_max_memory
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.module_sizes import Classes, outline_of
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Budgets, fold
from offstage.stages.plan.policies import POLICIES
from offstage.stages.plan.policies.optimal import optimal
from offstage.stages.plan.predict import work
from offstage.stages.plan.request.geometry import Request, geometry_of
from offstage.stages.units import CPU, DISK, DeviceId

REQUEST = Request(sequences=1, prompt=256, length=512)
"""What a budget that is worked out leaves room for where nobody says what will be asked of the model."""


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
    budgets: Budgets = {CPU: 0, DISK: None, **(get_max_memory(max_memory) if max_memory else _free(model, outline))}
    # A map has a module compute where it lies, or on the main device: it can't say more of what is streamed.
    placement = optimal(outline, budgets, links=1) if policy == "optimal" else POLICIES[policy](outline, budgets)
    require_fit(lay_out(outline, placement, budgets))
    return fold(outline, placement.homes), budgets


def _free(model: nn.Module, outline: Outline) -> Budgets:
    """Return what this machine can give to weights beside ``REQUEST``, as a run works it out: the model is rehearsed.

    It changes how the C library gives memory back and how many compiled kernels are kept, which the figures of the
    machine's kernels rely on.
    """
    return_freed_memory()
    bound_kernel_caches()
    config: Any = getattr(model, "config", None)
    shape: Mapping[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    rehearsed = describe(model, no_split=outline.skeleton.no_split)
    forward = Outline(replace(outline.skeleton, moments=rehearsed.moments, caches=rehearsed.caches))
    needs = work(forward, geometry_of(shape), REQUEST, local_kernels(user_cache() / MEASURED))
    return allow(None, Hardware(local_accelerators(), host_memory()), needed=needs.bytes).budgets
