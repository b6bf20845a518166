"""A model on its stage, for tests: placed on simulated or real accelerators, the host and disk, and streamed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.dispatch.dispatch_plan import DispatchPlan, make_dispatch_plan
from offstage.stages.dispatch.streaming.streamer import Streamer
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.skeleton import Skeleton, parent
from offstage.stages.machine.devices import Devices, Ledger
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Placement
from offstage.stages.plan.plan import DevicePlan
from offstage.stages.shard_load.expert_rows import locate_rows
from offstage.stages.units import CPU, DeviceId
from tests.stages.plan.plans import plan_by_hand
from tests.stages.shard_load.checkpoints import disk_weights

X = torch.randn(3, 64)
ROOM = 10**7


class Layer(nn.Sequential):
    """What computes on one device."""


def net(width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    wide = 3 * width // 2
    layers = [Layer(nn.Linear(width, wide), nn.ReLU(), nn.LayerNorm(wide), nn.Linear(wide, width)) for _ in range(4)]
    return nn.Sequential(*layers).eval().requires_grad_(False)


LAYOUTS: Mapping[str, Callable[[str], DeviceId]] = {
    "host": lambda name: "cpu",
    "disk": lambda name: "disk",
    "mixed": lambda name: {"0": 0, "1": "cpu", "2": "disk", "3": "cpu" if "weight" in name else "disk"}[name[0]],
    "torn": lambda name: [0, "cpu", "disk"][sum(map(ord, name)) % 3],
}


def to_disk(model: nn.Module, on_disk: set[str], path: Path, *, begin: int = 24) -> dict[str, Extent]:
    """Write the tensors named to ``path``, leave meta tensors in their places, and return where they lie.

    The first lies at ``begin``. For one token MKL sums up in an order that depends on where a matrix lies, up to 16
    bytes: where bits are compared, it must be a multiple of that, as it is in memory.
    """
    tensors = tensors_of(model)
    data, begins = bytearray(begin), {}
    for name in sorted(on_disk):
        begins[name] = len(data)
        data += tensors[name].detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    path.write_bytes(data)
    file = ShardFile(path.name, path, path.stat().st_size, path.stat().st_mtime_ns, "")
    leave_empty(model, on_disk)
    shapes = {name: (str(tensors[name].dtype).removeprefix("torch."), tuple(tensors[name].shape)) for name in on_disk}
    return {name: Extent(file, begins[name], *shapes[name]) for name in on_disk}


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of ``model``, tied ones by each of their names."""
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def leave_empty(model: nn.Module, names: Collection[str]) -> None:
    """Leave meta tensors in the places of those named."""
    tensors = tensors_of(model)
    for name in names:
        owner, attribute = model.get_submodule(parent(name)), name.rpartition(".")[2]
        if attribute in owner._parameters:
            owner._parameters[attribute] = nn.Parameter(tensors[name].to("meta"), requires_grad=False)
        else:
            owner._buffers[attribute] = tensors[name].to("meta")


def score_for(
    skeleton: Skeleton,
    homes: Mapping[str, DeviceId],
    execution: Mapping[str, DeviceId],
    rooms: Mapping[DeviceId, int] | None = None,
) -> DispatchPlan:
    outline = Outline(skeleton)
    serving = lay_out(outline, Placement(homes, CPU), execution=execution, io="direct").serving
    leaders = {skeleton.leader(name): home for name, home in homes.items()}
    computes = {layer.name: execution[parent(layer.tensors[0])] for layer in outline.layers if layer.tensors}
    kept = lay_out(outline, Placement(leaders, 0, computes=computes), {}).reserves
    devices = {device: DevicePlan(None, 0, reserve=count) for device, count in {**kept, **(rooms or {})}.items()}
    return make_dispatch_plan(skeleton, plan_by_hand(homes, execution, serving, main=0, devices=devices))


class Setup:
    """A model placed by ``homes`` (name → device) and streamed, to the devices given or to two simulated ones.

    ``store`` writes what lies on disk, which is served as ``serving`` says where that is given. ``rooms`` are for what
    streams to each device, in bytes; else there is as much as a plan keeps.
    """

    def __init__(
        self,
        model: nn.Module,
        homes: Callable[[str], DeviceId],
        folder: Path,
        *,
        devices: Devices | None = None,
        **options: Any,
    ) -> None:
        example, execution = options.pop("example", X), options.pop("execution", lambda module: 0)
        skeleton = describe(model, call=lambda m: m(example.to("cpu")), no_split={"Layer"})
        placed = {tensor.name: homes(tensor.name) for tensor in skeleton.tensors}
        self.model, self.devices = model, devices or Devices({0: ROOM, 1: ROOM})
        computes = {parent(name): execution(parent(name)) for name in placed}
        self.score = score_for(skeleton, placed, computes, options.pop("rooms", None))
        self.score = replace(self.score, staging_bytes=options.pop("staging_bytes", self.score.staging_bytes))
        self.score = replace(self.score, unpacking=options.pop("unpacking", {}), slots=options.pop("slots", {}))
        serving = options.pop("serving", None)
        if serving is not None:
            parts = {n: replace(p, serving=dict.fromkeys(p.serving, serving)) for n, p in self.score.parts.items()}
            self.score = replace(self.score, parts=parts)
        for name, home in placed.items():
            if isinstance(home, int):
                owner, attribute = model.get_submodule(parent(name)), name.rpartition(".")[2]
                on_device = self.devices.put(owner._parameters[attribute].data, home)
                owner._parameters[attribute] = nn.Parameter(on_device, requires_grad=False)
        self.resident = sum(tensor.bytes for tensor in skeleton.tensors if placed[tensor.name] == 0)
        store = options.pop("store", to_disk)
        extents = store(model, {name for name, home in placed.items() if home == "disk"}, folder / "weights")
        stacks = [name for part in self.score.parts.values() if part.experts for name in part.experts.tensors]
        rows = {name: locate_rows([at], at.shape, at.dtype) for name in stacks if (at := extents.get(name))}
        self.streamer = Streamer(model, self.score, stored=disk_weights(extents, rows), devices=self.devices, **options)

    def ledger(self, device: int) -> Ledger:
        ledger = self.devices.ledger(device)
        assert ledger is not None
        return ledger

    @property
    def reserve(self) -> int:
        return self.score.reserves[0]
