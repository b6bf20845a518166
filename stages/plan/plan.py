"""The plan as data: a table of the devices, and one of the tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from offstage.pipeline.atomic_files import write_text
from offstage.stages.empty_init.skeleton import Skeleton
from offstage.stages.hosts.partition import Partition, share
from offstage.stages.machine.rates import Rates
from offstage.stages.plan.expert_slots import Pool
from offstage.stages.plan.layout import Layout, Room
from offstage.stages.plan.outline import Layer
from offstage.stages.plan.placement import fold
from offstage.stages.plan.serving import Line, TensorTable
from offstage.stages.units import CPU, DISK, DeviceId, format_bytes, in_tier_order

FILE_NAME = "plan.json"
MAP_NAME = "device_map.json"
SIMULATED = "simulated"
"""The part of the host's peak that simulated accelerators hold: it is there only where they are simulated."""
PARTS: Mapping[str, str] = {
    "weights": "weights",
    **dict.fromkeys(("reserve", "staging", "dequantising"), "reserve"),
    "expert_cache": "slots",
    **dict.fromkeys(("cache", "heap"), "KV cache"),
    **dict.fromkeys(("activations", "scratch", "results", "learning", "offloaded", "assistant"), "activations"),
    "process": "process",
    "allocator": "allocator",
}
"""The parts of a device's ledger, and what each is shown as; some together."""
OFFLOAD, EXPLICIT = "cpu_offload_gb", "explicit"
"""What a plan names its policy where the number of gigabytes to offload was given, or a map."""
_ASKED_FOR = {EXPLICIT: "the map says so", OFFLOAD: f"{OFFLOAD} asks for it"}
"""Why a layer lies elsewhere than where it computes, under the policies that don't go by what is full."""


@dataclass(frozen=True, slots=True)
class DevicePlan(Room):
    """One device: what of its budget is for what, and what is expected of it. Bytes, but for rates: bytes a second.

    ``name`` is what the config calls it; ``budget_terms`` are those that an automatic budget is the sum of. ``pool``
    says for how many experts its ``expert_cache`` is, null where it has none. ``simulated`` are the weights that it
    takes before it is full, where it is simulated, else null. ``ledger`` is what it holds at its peak, by what that is
    for. A token has ``transfer_bytes`` go over its link, and reads ``used_bytes`` where they lie, if they are computed
    with there: of a mixture's experts those that it is routed to. ``rates`` are its own, where accelerators are unlike.
    """

    name: str = ""
    budget_terms: Mapping[str, int] = field(default_factory=dict)
    pool: Pool | None = None
    simulated: int | None = None
    ledger: Mapping[str, int] = field(default_factory=dict)
    transfer_bytes: int = 0
    used_bytes: int = 0
    rates: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_used(self) -> bool:
        """Whether it has something, or may have."""
        return self.budget != 0 or any(self.ledger.values())

    @property
    def own_parts(self) -> dict[str, int]:
        """Those parts of its peak that it has on the machine that is planned for."""
        return {part: count for part, count in self.ledger.items() if part != SIMULATED}

    @property
    def own_bytes(self) -> int:
        """The sum of these parts."""
        return sum(self.own_parts.values())


@dataclass(frozen=True, slots=True)
class HostPlan:
    """One of the hosts that a model is divided among: its ``blocks`` in words, what of its own plan the others know,
    the ``seconds`` of its part of a token, and the bytes that it streams for that.

    ``weights`` are the bytes that lie on each device; ``device_map``, ``budgets`` and ``predicted`` are as in ``Plan``.
    ``capabilities`` are what its last bits hang on, where it is there.
    """

    blocks: str
    weights: Mapping[DeviceId, int]
    device_map: Mapping[str, DeviceId]
    budgets: Mapping[DeviceId, int | None]
    predicted: Mapping[DeviceId, Mapping[str, int]]
    seconds: float
    streamed_bytes: int
    capabilities: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AlikeLayers:
    """Layers whose tensors lie alike: their ``names``, and the lines of one, whose names go on from the layer's.

    A line has the name of the layer for none, and its own name's end for its leader, where it isn't tied.
    """

    names: tuple[str, ...]
    lines: tuple[Line, ...]

    def lines_of(self, layer: str) -> Iterator[Line]:
        """Yield the lines of ``layer``, one of the names."""
        for line in self.lines:
            name = f"{layer}.{line.name}" if layer and line.name else layer or line.name
            yield line._replace(name=name, layer=layer, leader=line.leader or name)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a plan says of a load: where each tensor lies (``homes``), by the names that tensors have where it is used.

    Of those ``by_expert`` single experts are read from disk. Those ``packed_on_host`` wait there as they rest on disk,
    where they rest packed, and those that it ``packs`` are to rest packed in the offload store, where they shrink: the
    checkpoint has them plain. ``unpacks`` is false where whoever reads what lies on disk can't unpack it.
    """

    homes: Mapping[str, DeviceId] = field(compare=False)
    by_expert: Set[str] = frozenset()
    packed_on_host: Set[str] = frozenset()
    packs: Set[str] = frozenset()
    unpacks: bool = True


@dataclass(frozen=True)
class Plan(TensorTable):
    """Where every tensor lies and where every module computes: ``devices`` and ``tensors`` have it.

    The tensors are written by the layers that are alike, in the order of execution. ``reasons`` says why each layer
    lies where it does, in that order; ``notes`` are remarks in words. ``forecast`` has the bytes streamed and the
    seconds of a token, and its ``bottleneck``; ``rates`` the bytes a second that all of it was reckoned with.
    ``batch_size`` is how many prompts are answered together where that was the plan's to choose, else null; likewise
    ``lockstep``, how many batches share each pass. ``offload_ratio`` is the share of a training's activations that
    waits elsewhere, null where nothing is trained. ``pass_tokens`` are those of a pass of decoding, by which slots are
    divided among layers. ``codec`` is what streamed weights are compressed by that the checkpoint has plain, null where
    they stay so. ``block_rows`` has the weights of linear layers that are brought by blocks of so many rows, since not
    even the reserve can hold one of them whole.

    ``expandable`` says whether segments of torch's allocator expand on accelerators: what is reserved there is reckoned
    so, and they are turned on where its weights are placed.

    Where the model is divided among ``hosts``, it is the plan of one ``host``, for what that computes by the
    ``partition``; seconds are then those of a token on all of them.
    """

    policy: str
    main_device: DeviceId
    devices: Mapping[DeviceId, DevicePlan]
    layers: tuple[AlikeLayers, ...]
    reasons: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    forecast: Mapping[str, float | int | str] = field(default_factory=dict)
    rates: Mapping[str, int] = field(default_factory=dict)
    batch_size: int | None = None
    lockstep: int | None = None
    offload_ratio: float | None = None
    pass_tokens: int = 1
    codec: str | None = None
    expandable: bool = False
    block_rows: Mapping[str, int] = field(default_factory=dict)
    partition: Partition | None = None
    host: int = 0
    hosts: tuple[HostPlan, ...] = ()

    def share(self, skeleton: Skeleton) -> Skeleton:
        """Return ``skeleton``, of the whole model, as the host has it that this is the plan of."""
        return skeleton if self.partition is None else share(skeleton, self.partition.away(self.host))

    @cached_property
    def tensors(self) -> dict[str, Line]:
        """The line of every tensor by its name, tied ones included, in the order of execution."""
        alike_of = {layer: alike for alike in self.layers for layer in alike.names}
        order = {layer: place for place, layer in enumerate(self.reasons)}
        names = sorted(alike_of, key=lambda layer: order.get(layer, len(order)))
        return {line.name: line for layer in names for line in alike_of[layer].lines_of(layer)}

    @cached_property
    def device_map(self) -> dict[str, DeviceId]:
        """The shortest map that says where the tensors lie, module or tensor → device; what code makes as placed."""
        return fold({name: DISK if line.made else line.home for name, line in self.tensors.items()})

    @property
    def host_layers(self) -> tuple[str, ...]:
        """The layers that compute on the host because they lie there, beside accelerators."""
        return self.layers_on_host(self.main_device)

    @property
    def loading(self) -> LoadPlan:
        """What it says of a load."""
        packed = ("direct", "packed", "experts") if self.codec else ()
        return LoadPlan(
            self.homes,
            by_expert=frozenset(name for name, how in self.serving.items() if how == "experts"),
            packed_on_host=frozenset(name for name, line in self.tensors.items() if line.at_rest and line.home == CPU),
            packs=frozenset(name for name, how in self.serving.items() if how in packed),
        )

    @property
    def budgets(self) -> dict[DeviceId, int | None]:
        """The bytes of weights that each device may hold; null is no limit."""
        return {device: one.budget for device, one in self.devices.items()}

    @property
    def predicted(self) -> dict[DeviceId, Mapping[str, int]]:
        """The bytes of each device at its peak, by what they are for."""
        return {device: one.ledger for device, one in self.devices.items()}

    @property
    def used_bytes(self) -> dict[DeviceId, int]:
        """The bytes that a token reads on each device which computes with what it holds."""
        return {device: one.used_bytes for device, one in self.devices.items() if device != DISK}

    @property
    def known_rates(self) -> Rates:
        """The rates that it was made with."""
        given: dict[str, Any] = dict(self.rates)
        return Rates(**given, apart={device: one.rates for device, one in self.devices.items() if one.rates})

    @property
    def staging_bytes(self) -> int:
        """The bytes that the host may hold for streamed weights, where it computes some."""
        return self.devices[CPU].staging_bytes(is_main=self.main_device == CPU)

    def with_devices(self, *, simulated: Mapping[DeviceId, int], names: Mapping[DeviceId, str]) -> Plan:
        """Return the plan for the accelerators of a machine, some ``simulated``: those too that nothing is given."""
        devices = {
            device: replace(
                self.devices.get(device, DevicePlan(0, 0)),
                simulated=simulated.get(device),
                name=names.get(device, ""),
            )
            for device in in_tier_order([*self.devices, *simulated])
        }
        return replace(self, devices=devices)

    def save(self, folder: Path) -> None:
        """Write ``plan.json`` and ``device_map.json`` into ``folder``."""
        layers = [{"names": alike.names, "lines": [*map(_shown, alike.lines)]} for alike in self.layers]
        data = {**asdict(replace(self, layers=())), "layers": layers}
        write_text(folder / FILE_NAME, json.dumps(data, indent=1) + "\n")
        write_text(folder / MAP_NAME, json.dumps(self.device_map, indent=1) + "\n")


def part_name(part: str) -> str:
    """Return what a ``part`` of a ledger is called alone: as it is shown, where nothing else is shown so."""
    shown = PARTS.get(part, part)
    return shown if [*PARTS.values()].count(shown) == 1 else part


def plan_of(
    layout: Layout, *, policy: str, notes: tuple[str, ...] = (), budget_terms: Mapping[str, Mapping[str, int]] = {}
) -> Plan:
    """Return the plan that has everything lie as ``layout`` says."""
    return Plan(
        policy=policy,
        main_device=layout.placement.main,
        devices={
            device: DevicePlan(
                **asdict(room), budget_terms=budget_terms.get(str(device), {}), pool=layout.pools.get(device)
            )
            for device, room in layout.rooms.items()
        },
        layers=_alike_layers(layout),
        reasons={layer.name: _reason(layout, layer, policy) for layer in layout.outline.layers},
        notes=notes,
        block_rows=layout.block_rows,
    )


def _reason(layout: Layout, layer: Layer, policy: str) -> str:
    """Return why ``layer`` lies where it does, in words."""
    lines = list({layout.tensors[name].leader: layout.tensors[name] for name in layer.tensors}.values())
    homes = in_tier_order(line.home for line in lines)
    size, where = format_bytes(sum(line.used for line in lines)), " and ".join(str(home) for home in homes)
    device = lines[0].computes
    if homes == [device]:
        chosen = device == CPU != layout.placement.main
        return f"{size} resident on {where}{', which computes it: faster than to copy it to an accelerator' * chosen}"
    cause = _ASKED_FOR.get(policy, "the faster devices are full" if DISK in homes else "the accelerators are full")
    away = {line.leader for line in lines if line.home != device}
    how = "its experts streamed to" if away <= layout.outline.expert_tensors else "streamed to"
    return f"{size} on {where}, {how} {device}: {cause}"


def _alike_layers(layout: Layout) -> tuple[AlikeLayers, ...]:
    """Return the lines of ``layout`` by the layers that are alike."""
    names_of: dict[tuple[Line, ...], list[str]] = {}
    for layer, lines in groupby(layout.lines, key=lambda line: line.layer):
        names_of.setdefault(tuple(_within(layer, line) for line in lines), []).append(layer)
    return tuple(AlikeLayers(tuple(names), lines) for lines, names in names_of.items())


def _within(layer: str, line: Line) -> Line:
    """Return ``line`` as it is within its layer."""
    leader = "" if line.leader == line.name else line.leader
    return line._replace(name=line.name[len(layer) :].removeprefix("."), layer="", leader=leader)


def _shown(line: Line) -> dict[str, Any]:
    """Return ``line`` without what it has by default."""
    defaults = Line._field_defaults
    return {name: value for name, value in line._asdict().items() if name not in defaults or value != defaults[name]}
