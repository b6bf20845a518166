"""The stage plan: skeleton, budgets and policy → what goes where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, Fault
from pipeline.stage import Artifact, Config, Context, Report
from stages.empty_init import skeleton as skeletons
from stages.plan import budgets, options, plan as plans
from stages.plan.assemble import assemble
from stages.plan.hardware import Hardware, hardware
from stages.plan.outline import Outline
from stages.plan.policies import POLICIES
from stages.plan.policies.explicit import explicit, override
from stages.units import CPU, format_bytes, in_tier_order


class MakePlan:
    """Decides where every tensor lies and leaves ``plan.json`` and ``device_map.json``. It needs no torch."""

    name = "plan"
    version = 1
    needs: tuple[str, ...] = ()

    def check(self, config: Config) -> Iterable[Fault]:
        """Yield what is wrong with the budgets and the map, as far as neither model nor machine must be known."""
        yield from options.faults(config)

    def examine(self, config: Config) -> Iterable[Fault]:
        """Yield a fault where the map names an accelerator that isn't there."""
        if list(options.faults(config)):
            return
        try:
            _require_devices(config, hardware(config))
        except ConfigError as error:
            key, _, message = str(error).partition(": ")
            yield Fault(key, message)

    def key(self, context: Context) -> Mapping[str, object]:
        """The plan depends on the skeleton, the resolved budgets and the content of the map."""
        config = context.config
        machine = hardware(config)
        allowance = budgets.allow(config["max_memory"], machine)
        choice = options.read_choice(config["device_map"])
        return {
            "skeleton": context.artifact("empty_init").digest(skeletons.FILE_NAME),
            "policy": choice.policy,
            "entries": [[name, str(device)] for name, device in choice.entries.items()],
            "overrides": [[name, str(device)] for name, device in options.read_overrides(config).items()],
            "budgets": [[str(device), budget] for device, budget in allowance.budgets.items()],
            "terms": {device: dict(terms) for device, terms in allowance.terms.items()},
            "notes": list(allowance.notes),
            "accelerators": [accelerator.simulated for accelerator in machine.accelerators],
        }

    def build(self, context: Context, folder: Path) -> Any:
        """Write ``plan.json`` and ``device_map.json``."""
        outline = Outline(skeletons.from_json(context.artifact("empty_init").json(skeletons.FILE_NAME)))
        make_plan(outline, context.config).save(folder)

    def revive(self, context: Context) -> Any:
        """Return None: a plan is data, and later stages read the artifact."""

    def report(self, artifact: Artifact) -> Report:
        """Say what lies where, and what each device will hold."""
        plan = plans.from_json(artifact.json(plans.FILE_NAME))
        return Report(_summary(plan), memory=_memory(plan))


def make_plan(outline: Outline, config: Config) -> plans.Plan:
    """Return the plan of the model under ``config``.

    Raises ``ConfigError`` where the map doesn't fit the model or the machine, ``BudgetError`` where the budgets can't
    hold the plan.
    """
    machine = hardware(config)
    allowance = budgets.allow(config["max_memory"], machine)
    choice = options.read_choice(config["device_map"])
    _require_devices(config, machine)
    if choice.policy in POLICIES:
        placement = POLICIES[choice.policy](outline, allowance.budgets)
    else:
        placement = explicit(outline, choice.entries)
    placement = override(outline, placement, options.read_overrides(config))
    return assemble(outline, placement, allowance, policy=choice.policy)


def _require_devices(config: Config, machine: Hardware) -> None:
    budgets.require_present(options.read_choice(config["device_map"]).entries, machine, "device_map")
    budgets.require_present(options.read_overrides(config), machine, "device_map_overrides")


def _summary(plan: plans.Plan) -> str:
    held = [f"{device} {format_bytes(count)}" for device, count in plan.resident_bytes.items() if count]
    reserve = [f"reserve {format_bytes(plan.reserve_bytes)} on {plan.main_device}"] if plan.reserve_bytes else []
    return "; ".join([", ".join(held), *reserve, *plan.notes])


def _memory(plan: plans.Plan) -> dict[str, dict[str, int | None]]:
    """Return the weights allowed on each device and its predicted peak, in bytes."""
    devices = in_tier_order([*plan.budgets, plan.main_device])
    peaks = {device: plan.resident_bytes.get(device, 0) for device in devices}
    peaks[plan.main_device] += plan.reserve_bytes
    peaks[CPU] = peaks.get(CPU, 0) + budgets.BASE_PROCESS_BYTES
    return {
        "budget": {str(device): plan.budgets.get(device) for device in devices},
        "predicted": {str(device): count for device, count in peaks.items()},
    }
