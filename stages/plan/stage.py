"""The stage plan: skeleton, budgets and policy → what goes where."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, Fault
from pipeline.stage import MEASURED, Artifact, Config, Context, Report
from stages.checkpoints.hub import checkpoint_folder
from stages.checkpoints.weight_files import weight_files
from stages.empty_init import skeleton as skeletons
from stages.machine.hardware import Hardware, coarse, hardware, ledgers
from stages.machine.rates import Rates, local_rates, read_rates
from stages.plan import budgets, options, picture, plan as plans, table
from stages.plan.assembly import assemble
from stages.plan.checks import require_room
from stages.plan.geometry import read_geometry, read_request
from stages.plan.outline import Outline
from stages.plan.placement import Placement
from stages.plan.policies import POLICIES
from stages.plan.policies.cpu_offload_gb import cpu_offload_gb
from stages.plan.policies.explicit import explicit, override
from stages.plan.policies.optimal import optimal
from stages.plan.predict import PROCESS_BYTES, Work, predict, work
from stages.plan.serving import Io, choose_io
from stages.units import CPU, format_bytes

SIZES_NAME = "sizes.json"


class PlanStage:
    """Decides where every tensor lies and leaves the plan, its map and its picture. It needs no torch."""

    name = "plan"
    version = 4
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
        """The plan depends on the skeleton, the resolved budgets, the content of the map, and the request's size."""
        config, outline = context.config, _outline(context)
        machine, needs = hardware(config), _work(outline, config)
        allowance = budgets.allow(config["max_memory"], machine, needed=_needed(machine, needs))
        choice = options.read_choice(config["device_map"])
        return {
            "skeleton": context.artifact("empty_init").digest(skeletons.FILE_NAME),
            "policy": choice.policy,
            "entries": [[name, str(device)] for name, device in choice.entries.items()],
            "gigabytes": choice.gigabytes,
            "overrides": [[name, str(device)] for name, device in options.read_overrides(config).items()],
            "budgets": [[str(device), budget] for device, budget in allowance.budgets.items()],
            "terms": {device: dict(terms) for device, terms in allowance.terms.items()},
            "notes": list(allowance.notes),
            "accelerators": [accelerator.simulated for accelerator in machine.accelerators],
            "ledgers": [accelerator.ledger_bytes for accelerator in machine.accelerators],
            "io": _io(config, machine, outline, allowance, needs),
            "tight": _tight(machine, outline, allowance, needs),
            "work": asdict(needs),
            "rates": asdict(_rates(context, machine)),
        }

    def build(self, context: Context, folder: Path) -> Any:
        """Write ``plan.json``, ``device_map.json``, the picture, and the sizes that the table is made from."""
        outline = _outline(context)
        plan = make_plan(outline, context.config, rates=_rates(context, hardware(context.config)))
        plan.save(folder)
        folder.joinpath(picture.FILE_NAME).write_text(picture.draw(plan, outline.sizes))
        folder.joinpath(SIZES_NAME).write_text(json.dumps(outline.sizes, indent=1) + "\n")

    def revive(self, context: Context) -> Any:
        """Return None: a plan is data, and later stages read the artifact."""

    def report(self, artifact: Artifact) -> Report:
        """Say what lies where, and what each device will hold."""
        plan = plans.from_json(artifact.json(plans.FILE_NAME))
        metrics = {f"predicted_{name}": value for name, value in plan.forecast.items() if not isinstance(value, str)}
        metrics |= {"simulated_accelerators": len(plan.ledgers)} if plan.ledgers else {}
        screen = table.render(plan, artifact.json(SIZES_NAME))
        return Report(_summary(plan), memory=_memory(plan), metrics=metrics, screen=screen)


def make_plan(outline: Outline, config: Config, *, rates: Rates | None = None) -> plans.Plan:
    """Return the plan of the model under ``config``, with what is predicted of it.

    Raises ``ConfigError`` where the map doesn't fit the model or the machine, ``BudgetError`` where the budgets can't
    hold the plan. ``rates`` are those of the machine; by default what the config gives, or nominal ones.
    """
    rates = rates or read_rates(config.get("hardware") or {})
    machine, needs = hardware(config), _work(outline, config)
    allowance = budgets.allow(config["max_memory"], machine, needed=_needed(machine, needs))
    choice = options.read_choice(config["device_map"])
    _require_devices(config, machine)
    placement = _place(outline, choice, allowance, rates)
    placement = override(outline, placement, options.read_overrides(config))
    allowance = budgets.with_idle_noted(allowance, placement.homes)
    io = _io(config, machine, outline, allowance, needs)
    plan = assemble(outline, placement, allowance, policy=choice.policy, io=io)
    plan = replace(plan, ledgers=ledgers(machine, plan.budgets))
    plan = predict(outline, plan, needs, rates)
    require_room(plan, machine)
    return plan


def _needed(machine: Hardware, needs: Work) -> int:
    """Return what the request takes beside weights where it computes; the host computes where nothing else does."""
    scratch = 0 if machine.accelerators else needs.scratch_bytes
    return needs.cache_bytes + needs.activation_bytes + scratch


def _io(config: Config, machine: Hardware, outline: Outline, allowance: budgets.Allowance, needs: Work) -> Io:
    """Return how the host reads what it streams, by the most that it may hold and the least that is then streamed.

    It is decided before the placement is known, so that a key can hold it: a plan that was made when memory was free
    isn't found again where it isn't.
    """
    asked = (config.get("storage") or {}).get("io", "direct")
    whole, most = outline.skeleton.bytes, allowance.budgets.get(CPU, 0)
    held = whole if most is None else min(most, whole)
    beside = needs.cache_bytes + needs.activation_bytes + needs.scratch_bytes + PROCESS_BYTES
    free = coarse(machine.host.available_bytes) - held - beside
    return choose_io(asked, streamed_bytes=whole - held, free_bytes=free)


def _tight(machine: Hardware, outline: Outline, allowance: budgets.Allowance, needs: Work) -> int | None:
    """Return the memory that is free where it may be too little, else null: then it changes nothing of the plan."""
    most = allowance.budgets.get(CPU)
    weights = outline.skeleton.bytes if most is None else min(most, outline.skeleton.bytes)
    largest = max(outline.sizes.values(), default=0)
    needed = weights + largest + needs.cache_bytes + needs.activation_bytes + needs.scratch_bytes + PROCESS_BYTES
    free = machine.host.available_bytes
    return None if needed <= free else coarse(free)


def _place(outline: Outline, choice: options.Choice, allowance: budgets.Allowance, rates: Rates) -> Placement:
    if choice.policy == "optimal":
        return optimal(outline, allowance.budgets, rates)
    if choice.policy in POLICIES:
        return POLICIES[choice.policy](outline, allowance.budgets)
    if choice.policy == options.OFFLOAD:
        return cpu_offload_gb(outline, allowance.budgets, choice.gigabytes)
    return explicit(outline, choice.entries)


def _outline(context: Context) -> Outline:
    return Outline(skeletons.from_json(context.artifact("empty_init").json(skeletons.FILE_NAME)))


def _work(outline: Outline, config: Config) -> Work:
    model = config.get("model") or {}
    return work(outline, read_geometry(model), read_request(config.get("generate") or {}, model))


def _rates(context: Context, machine: Hardware) -> Rates:
    """Return the rates that the config gives, or this machine's, measured on the checkpoint's largest file."""
    described = context.config.get("hardware") or {}
    if described.get("rates") or described.get("devices") is not None:
        return read_rates(described)
    files = weight_files(checkpoint_folder(context.config["model"]))
    sample = max(files, key=lambda path: path.stat().st_size, default=None)
    return local_rates(context.cache / MEASURED, sample, [accelerator.name for accelerator in machine.accelerators])


def _require_devices(config: Config, machine: Hardware) -> None:
    budgets.require_present(options.read_choice(config["device_map"]).entries, machine, "device_map")
    budgets.require_present(options.read_overrides(config), machine, "device_map_overrides")


def _summary(plan: plans.Plan) -> str:
    held = [f"{device} {format_bytes(count)}" for device, count in plan.resident_bytes.items() if count]
    reserve = [f"reserve {format_bytes(plan.reserve_bytes)} on {plan.main_device}"] if plan.reserve_bytes else []
    return "; ".join([", ".join(held), *reserve, *plan.notes])


def _memory(plan: plans.Plan) -> dict[str, dict[str, int | None]]:
    """Return the weights allowed on each device and its predicted peak, in bytes."""
    return {
        "budget": {str(device): budget for device, budget in plan.budgets.items()},
        "predicted": {str(device): sum(parts.values()) for device, parts in plan.predicted.items()},
    }
