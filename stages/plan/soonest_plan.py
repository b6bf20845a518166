"""The plan of what it depends on: where everything lies, of what is open the soonest, in budgets that hold it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import islice

from offstage.pipeline.errors import BudgetError
from offstage.stages.machine.hardware import Hardware, given_names, ledgers
from offstage.stages.plan import budgets, lossless, options, plan as plans
from offstage.stages.plan.budgets import Allowance
from offstage.stages.plan.cache_home import cache_notes
from offstage.stages.plan.checks import (
    ShortageError,
    has_room,
    host_is_short,
    require_fit,
    require_resident,
    require_room,
)
from offstage.stages.plan.hosts import with_division
from offstage.stages.plan.inputs import Demand, PlanInputs
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Budgets, Placement, Shortage, execution_device
from offstage.stages.plan.policies import POLICIES
from offstage.stages.plan.policies.explicit import cpu_offload_gb, explicit, override
from offstage.stages.plan.policies.host_layers import with_host_layers
from offstage.stages.plan.policies.optimal import Search
from offstage.stages.plan.predict import predict
from offstage.stages.plan.request.choose import PlanOption, brings_more, choose
from offstage.stages.plan.reserves import block_sizes, least_blocks, may_divide
from offstage.stages.plan.traffic import Step, forecast
from offstage.stages.units import CPU, DeviceId

STAGING = "staging"
"""What the host's staging memory is called in a plan's ledger, and among the terms of its budget."""
_WORTH_BLOCKS = 0.01
"""The share of the host's memory that blocks of rows must save, beside products and of what comes at a time, before a
plan by them is made."""
_Placed = Callable[[tuple[tuple[DeviceId, int | None], ...], Step, bool], Placement]
"""Places what budgets allow for a step; the last says whether the widest weights come by blocks of rows."""
_Make = Callable[[Demand], PlanOption]
"""Makes the plan for a demand, in its budgets."""


def plan_from(inputs: PlanInputs) -> plans.Plan:
    """Return the plan of these inputs, with what is predicted of it: of what is open the soonest.

    That are the batch size, and whether floats rest packed. Raises ``ConfigError`` where the map doesn't fit the model
    or the machine, ``BudgetError`` where the budgets can't hold the plan.
    """
    require_devices(inputs.choice, inputs.overrides, inputs.machine)
    options, refusal = [], None
    for one in filter(None, (inputs.plain, inputs)):
        try:
            options.append(_soonest_size(one))
        except BudgetError as error:
            refusal = error
    if refusal is not None and not options:
        raise refusal
    soonest = min(options, key=lambda option: option.seconds)
    require_room(soonest.plan, inputs.machine, soonest.allocator)
    plan = replace(soonest.plan, notes=(*soonest.plan.notes, *inputs.notes))
    return plan if inputs.division is None else with_division(plan, inputs.division, inputs.host)


def _soonest_size(inputs: PlanInputs) -> PlanOption:
    """Return the plan of these inputs; where the batch size is open, of the soonest one."""
    make = partial(_plan_for, inputs, cache(partial(_placed, inputs)))
    *larger, least = inputs.demands
    options = [_least_plan(inputs, least, make)]
    for demand in reversed(larger):
        option = _larger_plan(inputs, demand, make)
        if option is not None and (not inputs.lockstep or brings_more(option, options)):
            options.append(option)
        elif inputs.lockstep:
            break
    return choose(options, fewest=inputs.lockstep)


def _larger_plan(inputs: PlanInputs, demand: Demand, make: _Make) -> PlanOption | None:
    """Return the plan for more than the least that may go together; null where there is no room for it."""
    with suppress(BudgetError):
        option = make(demand)
        if (allowance := _beside_staging(inputs, demand.allowance, option.plan)) is not None:
            option = make(replace(demand, allowance=allowance))
        return option if has_room(option.plan, inputs.rooms) else None
    return None


def _least_plan(inputs: PlanInputs, demand: Demand, make: _Make) -> PlanOption:
    """Return the plan for the least ``demand``; of two that a budget which is worked out allows, the sooner.

    Raises ``BudgetError``, with the machine's limit, where there can be none.
    """
    divided = None
    try:
        whole = _at_least(inputs, demand, make)
    except BudgetError:
        if (divided := _by_blocks(inputs, demand, make)) is None:
            raise
        return divided
    with suppress(BudgetError):
        streams = whole.plan.forecast["streamed_bytes_per_token"]
        divided = _by_blocks(inputs, demand, make) if streams else None
    return min(filter(None, (whole, divided)), key=lambda option: option.seconds)


def _by_blocks(inputs: PlanInputs, demand: Demand, make: _Make) -> PlanOption | None:
    """Return the plan of which the widest weights come by blocks of rows, null where that leaves no more to weights.

    What products with such a weight take beside it is as much as for a block then, and no longer the widest of all; and
    no room is kept for all of it. What still comes whole may take more than the least block. A mixture's widest weight
    has a place before slots are many: what that would take is then left over.
    """
    outline, asked = inputs.outline, demand.allowance
    if not asked.terms or inputs.machine.accelerators or inputs.choice.policy != "optimal" or not may_divide(outline):
        return None
    sizes = least_blocks(outline)
    needed = inputs.needs(demand, sizes).host_bytes
    saved = demand.needs.host_bytes - needed + max((size - block for size, block in sizes.items()), default=0)
    if saved < _WORTH_BLOCKS * inputs.machine.host.available_bytes:
        return None

    def made(request: int, spare: int) -> tuple[PlanOption, int]:
        """Return the plan that leaves so much to the ``request``, and how much that takes by it."""
        allowance = replace(asked.beside("request", request), by_blocks=True)
        allowance = allowance.beside("spare", spare) if spare else allowance
        option = _at_least(inputs, replace(demand, allowance=allowance), make)
        return option, inputs.needs(demand, block_sizes(outline, option.plan.block_rows)).host_bytes

    option, taken = made(needed, 0)
    if taken <= needed:
        return option
    options: list[PlanOption] = []
    with suppress(BudgetError):
        option, more = made(taken, 0)
        options += [option] if more <= taken else []
    room = asked.beside("request", needed).budgets[CPU] or 0
    step = max(1, room // 8)
    spared = (made(needed, spare) for spare in range(step, room // 2 + 1, step))
    try:
        options += islice((option for option, taken in spared if taken <= needed), 1)
    except BudgetError:
        if not options:
            raise
    return min(options, key=lambda option: option.seconds, default=None)


def _at_least(inputs: PlanInputs, demand: Demand, make: _Make) -> PlanOption:
    """Return the plan for ``demand``: a budget that was worked out then is as large as it must be.

    Raises ``BudgetError``, with the machine's limit, where that can't be.
    """
    asked = demand.allowance
    while True:
        try:
            option = make(demand)
        except ShortageError as error:
            short = error.shortage
            allowance = asked.with_least(short.device, short.least)
            if allowance is None and asked.terms and short.device == CPU:
                short, taken = _least_that_works(inputs, replace(demand, allowance=asked), short, make)
                raise host_is_short(short, taken, inputs.machine.host) from error
            if allowance is None:
                raise
        else:
            allowance = _beside_staging(inputs, asked, option.plan)
            if allowance is None:
                return option
            asked = allowance
        demand = replace(demand, allowance=allowance)


def _least_that_works(
    inputs: PlanInputs, demand: Demand, short: Shortage, make: _Make
) -> tuple[Shortage, Mapping[str, int]]:
    """Return what is ``short`` of the host's memory, and the terms beside it: some are known once there is a plan."""
    asked = demand.allowance
    enough = replace(asked, budgets={**asked.budgets, CPU: short.least})
    try:
        option = make(replace(demand, allowance=enough))
    except ShortageError as error:
        return error.shortage, asked.host_terms
    return short, (_beside_staging(inputs, asked, option.plan) or asked).host_terms


def _beside_staging(inputs: PlanInputs, asked: Allowance, plan: plans.Plan) -> Allowance | None:
    """Return what is ``asked`` with an automatic budget that leaves what experts pass through on the host in ``plan``.

    Whether they do is known once they are placed. Null where nothing is left to change.
    """
    staging = 0 if inputs.machine.accelerators else plan.predicted[CPU].get(STAGING, 0)
    return asked.beside(STAGING, staging) if asked.terms and staging > -asked.host_terms.get(STAGING, 0) else None


def _plan_for(inputs: PlanInputs, placed: _Placed, demand: Demand) -> PlanOption:
    """Return the plan that leaves room for ``demand``, placed as ``placed`` does in the budgets for a step."""
    outline, fastest, size = inputs.outline, inputs.execution == options.FASTEST, demand.size
    # Where a layer computes is settled but for ``fastest``, so how long many tokens take changes nothing of the rest.
    moving = demand.step if fastest else replace(demand.step, tokens=1, output_bytes=0)
    placement = placed(tuple(demand.allowance.budgets.items()), moving, demand.allowance.by_blocks)
    policy, blocks = inputs.choice.policy, [layer for layer in outline.layers if layer.name in outline.blocks]
    allowance = budgets.with_idle_noted(demand.allowance, placement, layers=blocks or outline.layers, policy=policy)
    if fastest and placement.main == CPU:
        idle = "execution=fastest changes nothing: no accelerator computes"
        allowance = replace(allowance, notes=(*allowance.notes, idle))
    layout = lay_out(outline, placement, allowance.budgets, io=demand.io)
    require_fit(layout)
    plan = plans.plan_of(layout, policy=policy, notes=allowance.notes, budget_terms=allowance.terms)
    require_resident(plan, written=outline.skeleton.written, learning=inputs.learning)
    codec, trains = lossless.NAME if inputs.packing else None, inputs.offload_ratio is not None
    listed = ledgers(inputs.machine, plan.budgets, beside=demand.needs.activation_bytes if trains else 0)
    plan = plan.with_devices(simulated=listed, names=given_names(inputs.machine))
    plan = replace(plan, offload_ratio=inputs.offload_ratio, codec=codec, expandable=inputs.expandable)
    plan = replace(plan, lockstep=size) if inputs.lockstep else replace(plan, batch_size=size)
    needs = inputs.needs(demand, block_sizes(outline, plan.block_rows))
    plan = predict(layout, plan, needs, inputs.rates, step=demand.step, process_bytes=inputs.process_bytes)
    seconds = float(plan.forecast["seconds_per_token"])
    advice = cache_notes(layout, needs, inputs.rates, seconds=seconds, members=demand.step.members)
    plan = replace(plan, notes=(*plan.notes, *advice))
    if size is not None and not inputs.lockstep:
        full, rest = divmod(inputs.count, size)
        seconds *= full
        seconds += forecast(layout, inputs.step(demand, rest), inputs.rates).seconds if rest else 0.0
    return PlanOption(size, plan, seconds, demand.allocator)


def _placed(
    inputs: PlanInputs, allowed: tuple[tuple[DeviceId, int | None], ...], step: Step, by_blocks: bool
) -> Placement:
    """Return the placement that was asked for. An adapter that learns stays where it computes, whatever a map says."""
    outline, kept = inputs.outline, inputs.learning if inputs.learns == "adapter" else ()
    taken = sum(outline.sizes[name] for name in kept)
    left = {device: room if room is None else max(0, room - taken) for device, room in allowed}
    placement = override(outline, _place(inputs, step, left, by_blocks), inputs.overrides)
    at_home = {name: execution_device(outline, outline.layer_of[name], placement) for name in kept}
    return replace(placement, homes={**placement.homes, **at_home})


def _place(inputs: PlanInputs, step: Step, allowed: Budgets, by_blocks: bool) -> Placement:
    """Return the placement of the policy in the budgets ``allowed``, accelerators unpacking where that is sooner."""
    outline, choice = inputs.outline, inputs.choice
    if inputs.execution == options.FASTEST:
        return with_host_layers(outline, allowed, inputs.rates, step=step)
    search = Search(inputs.rates, step, by_blocks=by_blocks)
    if choice.policy == "optimal":
        return search.optimal(outline, allowed)
    return search.unpacking_too(outline, allowed, lambda rooms, _: [_by_policy(choice, outline, rooms)])


def _by_policy(choice: options.Choice, outline: Outline, allowed: Budgets) -> Placement:
    """Return the one placement of a policy that doesn't weigh any, or of an explicit map."""
    if choice.policy in POLICIES:
        return POLICIES[choice.policy](outline, allowed)
    if choice.policy == plans.OFFLOAD:
        return cpu_offload_gb(outline, allowed, choice.gigabytes)
    return explicit(outline, choice.entries)


def require_devices(choice: options.Choice, overrides: Mapping[str, DeviceId], machine: Hardware) -> None:
    """Raise ``ConfigError`` where the map or its overrides name an accelerator that isn't there."""
    budgets.require_present(choice.entries, machine, "device_map")
    budgets.require_present(overrides, machine, "device_map_overrides")
