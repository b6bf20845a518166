"""The stage dispatch: placed weights → a model that can be called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import Fault
from pipeline.stage import Artifact, Config, Context, Report
from stages.dispatch.score import FILE_NAME, from_json, write_score
from stages.empty_init import skeleton as skeletons
from stages.plan import plan as plans
from stages.units import format_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stages.dispatch.streaming import Streamer


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A model that can be called wherever its weights lie, its hooks, its main device, and what loading it cost."""

    model: nn.Module
    streamer: Streamer
    device: torch.device
    load_seconds: float
    read_bytes: int


class Dispatch:
    """Leaves ``dispatch.json``; its live half is the model with its hooks."""

    name = "dispatch"
    version = 1
    needs: tuple[str, ...] = ("shard_load",)

    def check(self, config: Config) -> Iterable[Fault]:
        """Yield nothing: the stage has no keys of its own."""
        return ()

    def examine(self, config: Config) -> Iterable[Fault]:
        """Yield nothing: the stage has no keys of its own."""
        return ()

    def key(self, context: Context) -> Mapping[str, object]:
        """The score depends on the skeleton and the plan; which weights they are, shard_load's key says."""
        return {
            "skeleton": context.artifact("empty_init").digest(skeletons.FILE_NAME),
            "plan": context.artifact("plan").digest(plans.FILE_NAME),
            "weights": context.artifact("shard_load").key,
        }

    def build(self, context: Context, folder: Path) -> Any:
        """Write ``dispatch.json``; no weight is touched."""
        skeleton = skeletons.from_json(context.artifact("empty_init").json(skeletons.FILE_NAME))
        plan = plans.from_json(context.artifact("plan").json(plans.FILE_NAME))
        write_score(skeleton, plan).save(folder)

    def revive(self, context: Context) -> Dispatched:
        """Return the placed model with its hooks attached."""
        from stages.dispatch.streaming import Streamer, pin_device
        from stages.shard_load.placing import torch_device

        score = from_json(context.artifact("dispatch").json(FILE_NAME))
        placed = context.live("shard_load")
        streamer = Streamer(placed.model, score, offloaded=placed.offloaded, torch_device=torch_device)
        main = torch_device(score.main_device)
        pin_device(placed.model, main)
        return Dispatched(placed.model, streamer, main, placed.load_seconds, placed.read_bytes)

    def report(self, artifact: Artifact) -> Report:
        """Say what computes where and how much is streamed a pass."""
        score = from_json(artifact.json(FILE_NAME))
        streamed = sum(1 for part in score.parts.values() if part.streamed)
        where = f"computes on {score.main_device}"
        if not streamed:
            return Report(f"{where}, everything resident")
        return Report(
            f"{where}, {streamed} of {len(score.parts)} modules streamed: {format_bytes(score.streamed_bytes)} a pass"
        )
