"""The stage plan: skeleton, budgets and policy → what goes where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from offstage.pipeline.errors import ConfigError, Fault
from offstage.pipeline.interpreter import uncollected
from offstage.pipeline.peers import started_together
from offstage.pipeline.stage import Artifact, Config, Context, Report, Stage
from offstage.pipeline.typed_config import read
from offstage.stages.empty_init import skeleton as skeletons
from offstage.stages.empty_init.identity import is_plan
from offstage.stages.empty_init.stage import FUSED, EmptyInitStage, multiplies_packed
from offstage.stages.hosts.partition import Partition, chain_of, share
from offstage.stages.machine.hardware import Hardware, hardware
from offstage.stages.machine.hosts import (
    host_config,
    host_count,
    own_host,
    read_network,
    require_alike,
    require_started,
    unlike,
)
from offstage.stages.machine.kernels import capabilities
from offstage.stages.plan import options, plan as plans, table
from offstage.stages.plan.checks import require_host
from offstage.stages.plan.declared_metrics import LINK_BYTES, PLAN_METRICS, PREDICTED
from offstage.stages.plan.figures import (
    begin_measuring,
    host_kernels,
    is_light,
    known_machine_and_kernels,
    machine_rates,
    prepare,
    with_row_blocks,
)
from offstage.stages.plan.hosts import (
    Division,
    PlannedHost,
    agreed,
    divide,
    in_lockstep,
    served_faults,
    soonest_together,
)
from offstage.stages.plan.inputs import PlanInputs, gather_inputs
from offstage.stages.plan.lossless import possible_packing, with_copies
from offstage.stages.plan.options import PlanConfig
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.plan import SIMULATED
from offstage.stages.plan.request.choose import why_not_in_lockstep
from offstage.stages.plan.request.media_demand import media_demand
from offstage.stages.plan.request.requests import asking, lockstep_is_chosen, read_request
from offstage.stages.plan.request.training import training_demand
from offstage.stages.plan.soonest_plan import plan_from, require_devices
from offstage.stages.units import CPU, DeviceId, format_bytes, in_tier_order


class PlanStage(Stage[PlanInputs]):
    """Decides where every tensor lies and leaves the plan and its map. It needs no torch."""

    name = "plan"
    doing = "measures what isn't known yet of this machine, and says what goes where"
    version = 53
    needs: tuple[str, ...] = ()
    config_class = PlanConfig
    metrics = PLAN_METRICS

    def check(self, config: Config) -> Iterable[Fault]:
        """Yield what is wrong with the budgets and the map, as far as neither model nor machine must be known."""
        given = read(PlanConfig, config)
        yield from options.faults(given)
        yield from served_faults(config)
        if given.execution == options.FASTEST and asking(config) == "finetune":
            yield Fault(
                "execution",
                f"{options.FASTEST!r} is chosen by what a token takes, which says nothing of a step of training; take "
                "execution=exact",
            )
        if multiplies_packed(config) and asking(config) == "finetune":
            yield Fault("quantized.products", f"{FUSED!r} has no gradients, and the run trains; take 'exact'")

    def examine(self, config: Config) -> Iterable[Fault]:
        """Yield a fault where the map names an accelerator that isn't there."""
        given = read(PlanConfig, config)
        if list(options.faults(given)):
            return
        choice, overrides = options.read_choice(given.device_map), options.read_overrides(given.device_map_overrides)
        try:
            require_devices(choice, overrides, hardware(config))
        except ConfigError as error:
            yield Fault.of(error)

    def prepare_machine(self, config: Config, cache: Path) -> None:
        """Have the figures that plans go by measured and kept, unless they are or the config gives them."""
        prepare(config, cache)

    def begin_measuring(self, config: Config, cache: Path) -> None:
        """Have what a run's process holds found while this one imports what the model needs, if it has room to."""
        begin_measuring(host_config(config, own_host(config.get("hardware") or {})), cache)

    def gather(self, context: Context) -> PlanInputs:
        """Return the model, the resolved budgets, the content of the map, the request's work, the machine's figures."""
        described, stored = context.config.get("hardware") or {}, context.artifact("empty_init")
        host, config = own_host(described), host_config(context.config, own_host(described))
        outline = Outline(stored.read(skeletons.Skeleton, skeletons.FILE_NAME))
        light = host_count(described) < 2 and is_light(outline, config)
        machine, kernels = known_machine_and_kernels(config, context.cache, light=light)
        packing = possible_packing(read(PlanConfig, config).storage, outline, config, context.cache)
        rates = machine_rates(config, machine, context.cache, with_copies(outline, packing), light=light)
        measure = {"generate": media_demand, "finetune": training_demand}.get(asking(config))
        live = partial(context.live, EmptyInitStage.name)
        measured = measure(config, context.cache, skeleton=stored.key, live=live) if measure else None
        outline = with_row_blocks(outline, config, context.cache, machine)
        gather = partial(gather_inputs, skeleton=stored.key, measured=measured)
        if host_count(described) < 2:
            whole = partial(gather, outline, config, machine=machine, rates=rates, packing=packing)
            inputs = whole(kernels=kernels)
            needs_kernels = light and inputs.hangs_on_kernels
            return whole(kernels=host_kernels(config, context.cache)) if needs_kernels else inputs
        computes_by = _capabilities(machine) if started_together() > 1 else {}
        here = PlannedHost(machine, rates, kernels, config.get("max_memory"), computes_by)
        division = _division(outline, context, here, gather)
        part = replace(outline, skeleton=share(outline.skeleton, division.partition.away(host)))
        config = in_lockstep(config, division.lockstep)
        inputs = gather(part, config, machine=machine, rates=rates, kernels=kernels)
        return replace(inputs, division=division, host=host)

    def build(self, inputs: PlanInputs, context: Context, folder: Path) -> Any:
        """Write ``plan.json`` and ``device_map.json``."""
        with uncollected():
            plan = plan_from(inputs)
        if multiplies_packed(context.config):
            require_host(plan)
        plan.save(folder)

    def report(self, artifact: Artifact) -> Report:
        """Say what lies where, and what each device will hold."""
        plan = artifact.read(plans.Plan, plans.FILE_NAME)
        metrics = {f"{PREDICTED}{name}": value for name, value in plan.forecast.items()}
        devices = plan.devices.items()
        metrics |= {LINK_BYTES.on(name): one.transfer_bytes for name, one in devices if one.transfer_bytes}
        simulated = sum(one.simulated is not None for _, one in devices)
        metrics |= {"simulated_accelerators": simulated} if simulated else {}
        metrics |= {"host_layers": len(plan.host_layers)} if plan.host_layers else {}
        chosen = {"batch_size": plan.batch_size, "lockstep": plan.lockstep}
        metrics |= {name: size for name, size in chosen.items() if size}
        screen = table.render(plan)
        remarks = tuple(_remarks(plan))
        return Report(
            _summary(plan),
            memory=_memory(plan),
            metrics=metrics,
            screen=screen,
            remarks=remarks,
            hosts=tuple(map(_host, plan.hosts)),
            layers=tuple(_placed(plan)),
        )


def _placed(plan: plans.Plan) -> Iterator[dict[str, Any]]:
    """Yield the layers of ``plan`` as a record has them: those together that follow each other and lie alike."""
    homes: dict[str, list[DeviceId]] = {}
    for alike in plan.layers:
        homes |= dict.fromkeys(alike.names, in_tier_order(line.home for line in alike.lines))
    for devices, together in groupby((name for name in plan.reasons if name in homes), key=lambda name: homes[name]):
        names = list(together)
        yield {"devices": [*map(str, devices)], "count": len(names), "first": names[0], "last": names[-1]}


def _host(host: plans.HostPlan) -> dict[str, Any]:
    """Return what a record has of one of several hosts before it has come to anything."""
    predicted = {str(device): sum(parts.values()) for device, parts in host.predicted.items()}
    return {
        "memory": {"budget": {str(device): size for device, size in host.budgets.items()}, "predicted": predicted},
        "metrics": {
            f"{PREDICTED}seconds_per_token": host.seconds,
            f"{PREDICTED}streamed_bytes_per_token": host.streamed_bytes,
        },
        "kernels": dict(host.capabilities),
    }


def _remarks(plan: plans.Plan) -> Iterable[str]:
    """Yield what must be known of what the plan predicts, and of what will be computed under it."""
    if plan.host_layers:
        yield (
            f"{len(plan.host_layers)} layers computed on the host, where they lie (execution=fastest): the last bits "
            "of what is computed, and so tokens, may differ from those of other placements."
        )
    if difference := unlike([host.capabilities for host in plan.hosts]):
        yield f"{difference[0].upper()}{difference[1:]}: last bits, and so tokens, may be others than on one host."
    if "expert_hit_rate" in plan.forecast:
        yield "The plan assumed uniform routing: the bytes and seconds of a token may be far from those predicted."


def _division(outline: Outline, context: Context, here: PlannedHost, gather: Callable[..., PlanInputs]) -> Division:
    """Return how the model is divided among the hosts of the config, of which this is one where they are there."""
    described = context.config.get("hardware") or {}
    require_started(described, is_plan=is_plan(context.config))
    chain, alone = chain_of(outline.skeleton), bool(why_not_in_lockstep(outline.skeleton))

    def search(hosts: Sequence[PlannedHost]) -> Division:
        def divided(config: Config) -> Division:
            def plan_of(host: int, partition: Partition) -> plans.Plan:
                part = replace(outline, skeleton=share(outline.skeleton, partition.away(host)))
                one = hosts[host]
                own = {**host_config(config, host), "max_memory": one.max_memory}
                return plan_from(gather(part, own, machine=one.machine, rates=one.rates, kernels=one.kernels))

            members, network = read_request(config).members, read_network(described)
            return divide(outline.skeleton, chain, plan_of, hosts, network, members=members)

        chosen = lockstep_is_chosen(context.config)
        return soonest_together(in_lockstep(context.config, 1 if alone and chosen else None), divided)

    def planned() -> list[PlannedHost]:
        hosts = []
        for host in range(host_count(described)):
            own = host_config(context.config, host)
            machine, kernels = known_machine_and_kernels(own, context.cache, light=False)
            rates = machine_rates(own, machine, context.cache, outline)
            hosts.append(PlannedHost(machine, rates, kernels, own.get("max_memory")))
        return hosts

    division = agreed(here if started_together() > 1 else planned, search)
    require_alike(described, [host.capabilities for host in division.hosts])
    return division


def _capabilities(machine: Hardware) -> dict[str, str]:
    """Return what last bits hang on of what is computed on ``machine``, which is this one."""
    names = [one.name for one in machine.accelerators if not one.simulated]
    return {**capabilities(), **({"accelerators": ", ".join(names)} if names else {})}


def _summary(plan: plans.Plan) -> str:
    devices = plan.devices.items()
    weights = [f"{device} {format_bytes(one.weights)}" for device, one in devices if one.weights]
    kept = " and ".join(f"{format_bytes(one.reserve)} on {device}" for device, one in devices if one.reserve)
    reserve = [f"reserve {kept}"] if kept else []
    experts = [*table.experts_told(plan), *table.packed_told(plan), *table.host_layers_told(plan)]
    batch = [f"batches of {plan.batch_size}"] if plan.batch_size else []
    batch += [f"{plan.lockstep} in lockstep"] if (plan.lockstep or 1) > 1 else []
    blocks = [f"{len(plan.block_rows)} weights by blocks of rows"] if plan.block_rows else []
    unalike = [*filter(None, [unlike([host.capabilities for host in plan.hosts])])]
    ratio = [f"{plan.offload_ratio:.1%} of activations offloaded"] if plan.offload_ratio else []
    return "; ".join([", ".join(weights), *reserve, *experts, *blocks, *batch, *ratio, *unalike, *plan.notes])


def _memory(plan: plans.Plan) -> dict[str, dict[str, int | None]]:
    """Return the weights allowed on each device and its predicted peak, in bytes: those of the machine planned for.

    Told apart is the peak of a host that stands in for accelerators: this one's, if the plan is carried out here.
    """
    host, devices = plan.devices[CPU].ledger, {str(device): one for device, one in plan.devices.items() if one.is_used}
    return {
        "budget": {device: one.budget for device, one in devices.items()},
        "predicted": {device: one.own_bytes for device, one in devices.items()},
        **({SIMULATED: {str(CPU): sum(host.values())}} if SIMULATED in host else {}),
    }
