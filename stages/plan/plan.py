"""The plan as data: what goes where, and how much each device is to hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from offstage.pipeline.atomic_files import write_text
from offstage.stages.plan.expert_slots import Pool
from offstage.stages.plan.serving import Serving
from offstage.stages.units import CPU, DeviceId, parse_device

FILE_NAME = "plan.json"
MAP_NAME = "device_map.json"
_BY_DEVICE = (
    "budgets", "resident_bytes", "reserves", "slots", "predicted", "link_bytes_per_token", "ledgers", "used_bytes",
    "unpacking", "device_rates", "names",
)  # fmt: skip
SIMULATED = "simulated"
"""The part of the host's peak that simulated accelerators hold: it is there only where they are simulated."""


@dataclass(frozen=True)
class Plan:
    """Where every tensor lies and where every module computes.

    ``device_map`` is the folded map (module or tensor name → device id); ``homes`` has an entry for every tensor,
    tied names included; ``execution`` one for every module that holds tensors directly; ``serving`` one for every
    tensor that isn't resident where it computes: how it gets there. ``tied`` has the names that stand for another one's
    tensor, each with that name. ``budgets`` are bytes of weights (null: unlimited).
    ``resident_bytes`` counts tied tensors once; on disk it is what lies there. ``reserves`` are kept free for streamed
    weights on each device that computes some. ``slots`` are the bytes on each device that computes experts which lie
    elsewhere: they hold those that may be wanted again. ``pools`` says how many experts share them. ``reasons`` says
    why each layer lies where it does. ``notes`` are remarks in words; ``budget_terms`` lists what automatic budgets are
    the sum of.
    ``ledgers`` has, for each simulated accelerator, the bytes of weights that it takes before it is full.
    ``predicted`` are the bytes of each device at its peak, by what they are for; ``forecast`` the bytes streamed and
    the seconds of a token, and what bounds it; ``rates`` the bytes a second that all of it was reckoned with, and
    ``device_rates`` those of each accelerator where they are unlike. ``names`` are those that the config gives them.
    ``link_bytes_per_token`` has what of it goes over the link of each accelerator. ``used_bytes`` are those that a
    token reads on each device which computes with what it holds: of a mixture's experts those it is routed to.
    ``batch_size`` is how many prompts are answered together where that was the plan's to choose, else null; likewise
    ``lockstep``, how many batches share each pass.
    ``offload_ratio`` is the share of a training's activations that waits elsewhere, null where nothing is trained.
    ``packed`` has, for each codec, the bytes that rest packed by where they lie, and under ``used`` what they come to;
    ``packed_on_host`` the tensors that lie so on the host, tied names included.
    ``pass_tokens`` are those of a pass of decoding, by which slots are divided among layers. ``codec`` is what streamed
    weights are packed by that the checkpoint has plain, null where they stay so. ``host_layers`` are the layers that
    compute on the host because they lie there, beside accelerators. ``block_rows`` has the weights of linear layers
    that are brought by blocks of so many rows, since not even the reserve can hold one of them whole. ``unpacking`` are
    the bytes of each accelerator's budget by which it unpacks what comes to it packed; where one isn't listed the host
    does.
    """

    policy: str
    main_device: DeviceId
    device_map: Mapping[str, DeviceId]
    homes: Mapping[str, DeviceId]
    execution: Mapping[str, DeviceId]
    serving: Mapping[str, Serving]
    budgets: Mapping[DeviceId, int | None]
    resident_bytes: Mapping[DeviceId, int]
    reserves: Mapping[DeviceId, int]
    reasons: Mapping[str, str]
    tied: Mapping[str, str] = field(default_factory=dict)
    slots: Mapping[DeviceId, int] = field(default_factory=dict)
    pools: Mapping[DeviceId, Pool] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    budget_terms: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    predicted: Mapping[DeviceId, Mapping[str, int]] = field(default_factory=dict)
    forecast: Mapping[str, float | int | str] = field(default_factory=dict)
    link_bytes_per_token: Mapping[DeviceId, int] = field(default_factory=dict)
    ledgers: Mapping[DeviceId, int] = field(default_factory=dict)
    used_bytes: Mapping[DeviceId, int] = field(default_factory=dict)
    rates: Mapping[str, int] = field(default_factory=dict)
    device_rates: Mapping[DeviceId, Mapping[str, int]] = field(default_factory=dict)
    names: Mapping[DeviceId, str] = field(default_factory=dict)
    batch_size: int | None = None
    lockstep: int | None = None
    offload_ratio: float | None = None
    packed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    packed_on_host: tuple[str, ...] = ()
    pass_tokens: int = 1
    codec: str | None = None
    unpacking: Mapping[DeviceId, int] = field(default_factory=dict)
    host_layers: tuple[str, ...] = ()
    block_rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def packs(self) -> tuple[str, ...]:
        """The tensors that are to rest packed, where they can, which the checkpoint has plain."""
        ways = ("direct", "packed", "experts") if self.codec else ()
        return tuple(name for name, how in self.serving.items() if how in ways)

    @property
    def staging_bytes(self) -> int:
        """The bytes that the host may hold for streamed weights, where it computes some.

        They are its reserve, and what the plan left of its budget, slots aside.
        """
        reserve = self.reserves.get(CPU, 0)
        budget = self.budgets.get(CPU) if reserve or self.main_device == CPU else None
        left = 0 if budget is None else budget - self.resident_bytes.get(CPU, 0) - self.slots.get(CPU, 0)
        return max(reserve, left)

    def save(self, folder: Path) -> None:
        """Write ``plan.json`` and ``device_map.json`` into ``folder``."""
        write_text(folder / FILE_NAME, json.dumps(asdict(self), indent=1) + "\n")
        write_text(folder / MAP_NAME, json.dumps(dict(self.device_map), indent=1) + "\n")


def own_parts(predicted: Mapping[str, int]) -> dict[str, int]:
    """Return those parts of a device's predicted peak that it has on the machine that is planned for."""
    return {part: count for part, count in predicted.items() if part != SIMULATED}


def from_json(data: Mapping[str, Any]) -> Plan:
    """Return the plan that ``plan.json`` holds; JSON's string keys become device ids again."""
    fields = dict(data)
    for key in _BY_DEVICE:
        fields[key] = {parse_device(device): count for device, count in data.get(key, {}).items()}
    fields["pools"] = {parse_device(device): Pool(**pool) for device, pool in data.get("pools", {}).items()}
    for key in ("notes", "packed_on_host", "host_layers"):
        fields[key] = tuple(data.get(key, ()))
    return Plan(**fields)
