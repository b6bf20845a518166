"""The stage dispatch: placed weights → a model that can be called."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offstage.pipeline.stage import Artifact, Context, Report, Stage
from offstage.pipeline.typed_config import read
from offstage.stages.dispatch.dispatch_plan import FILE_NAME, DispatchPlan, make_dispatch_plan
from offstage.stages.empty_init import skeleton as skeletons
from offstage.stages.plan import plan as plans
from offstage.stages.units import CPU, format_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from offstage.stages.dispatch.streaming.streamer import Streamer
    from offstage.stages.machine.devices import Devices


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A model that can be called wherever its weights lie, its hooks and main device, what loading it cost, and all
    the devices. ``base_bytes`` are what the process held on the host before any weight, null where nothing tells.
    """

    model: nn.Module
    streamer: Streamer
    device: torch.device
    load_seconds: float
    read_bytes: int
    devices: Devices
    base_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """Whether to write a time line of reads, copies, stalls and computing."""

    trace: bool = False


@dataclass(frozen=True, slots=True)
class DispatchInputs:
    """The dispatch plan depends on the skeleton and the weights, by their keys, and on the plan, by its hash.

    ``traces`` says whether what is done with the model is to be traced.
    """

    skeleton: str
    plan: str
    weights: str
    traces: bool = field(compare=False)


class DispatchStage(Stage[DispatchInputs]):
    """Leaves ``dispatch.json``; its live half is the model with its hooks."""

    name = "dispatch"
    doing = "has the rest stream"
    version = 11
    needs: tuple[str, ...] = ("shard_load",)
    config_class = DispatchConfig

    def gather(self, context: Context) -> DispatchInputs:
        """Return the earlier artifacts that the dispatch plan is made of."""
        given = read(DispatchConfig, context.config)
        return DispatchInputs(
            skeleton=context.artifact("empty_init").key,
            plan=context.artifact("plan").digest(plans.FILE_NAME),
            weights=context.artifact("shard_load").key,
            traces=given.trace,
        )

    def build(self, inputs: DispatchInputs, context: Context, folder: Path) -> Any:
        """Write ``dispatch.json``; no weight is touched."""
        skeleton = context.artifact("empty_init").read(skeletons.Skeleton, skeletons.FILE_NAME)
        plan = context.artifact("plan").read(plans.Plan, plans.FILE_NAME)
        make_dispatch_plan(plan.share(skeleton), plan).save(folder)

    def revive(self, inputs: DispatchInputs, context: Context) -> Dispatched:
        """Return the placed model with its hooks attached."""
        from offstage.stages.dispatch.streaming.streamer import Streamer
        from offstage.stages.dispatch.transfer.trace import Trace
        from offstage.stages.empty_init.packed_modules import refuse_saving

        plan = context.artifact("dispatch").read(DispatchPlan, FILE_NAME)
        placed = context.live("shard_load")
        streamer = Streamer(
            placed.model,
            plan,
            stored=placed.offloaded,
            devices=placed.devices,
            host=placed.host,
            trace=Trace() if inputs.traces else None,
            borders=placed.borders,
        )
        refuse_saving(placed.model)
        main = placed.devices.torch_device(plan.main_device)
        return Dispatched(
            placed.model, streamer, main, placed.load_seconds, placed.read_bytes, placed.devices, placed.base_bytes
        )

    def report(self, artifact: Artifact) -> Report:
        """Say what computes where, how much is streamed a pass, and what the host takes that stands in for others."""
        plan = artifact.read(DispatchPlan, FILE_NAME)
        streamed = sum(1 for part in plan.parts.values() if part.streamed and not part.listed_expert)
        experts = sum(part.experts.count for part in plan.parts.values() if part.experts is not None)
        experts += len({part.listed_expert for part in plan.parts.values() if part.streamed and part.listed_expert})
        parts = [f"computes on {plan.main_device}"]
        if streamed:
            amount = format_bytes(plan.streamed_bytes)
            parts.append(f"{streamed} of {len(plan.parts)} modules streamed: {amount} a pass")
        if experts:
            parts.append(f"{experts} experts read when tokens are routed to them")
        summary = ", ".join(parts if len(parts) > 1 else [*parts, "everything resident"])
        host = {"predicted": {str(CPU): plan.host_peak_bytes}} if plan.host_peak_bytes else {}
        return Report(summary, memory=host)
