"""Where every tensor lies, and what follows from that alone: where layers compute, and the bytes on each device.

What is streamed then, and what is kept free for it, the layout says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from offstage.stages.empty_init.skeleton import upward
from offstage.stages.plan.outline import Layer, Outline
from offstage.stages.units import CPU, DISK, DeviceId, in_tier_order

Budgets = Mapping[DeviceId, int | None]
"""Bytes of weights that each device may hold; None is unlimited, a device that isn't listed holds nothing."""

Homes = Mapping[str, DeviceId]
"""Leader of a tied group, or a tensor's own name → the device where it lies."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What a policy decides: the ``homes`` of all leaders, and the ``main`` device, which computes what is streamed.

    Of those on the host some lie there ``packed``: as they rest on disk, to be unpacked for each use. ``computes`` has
    the layers, by name, that compute elsewhere than ``execution_device`` would have them by where their tensors lie.
    Accelerators that are among ``unpacks`` unpack there what comes to them packed, where they have the room. What comes
    by blocks of rows does so by the ``least_blocks`` where products with it are to take little beside it.
    """

    homes: Homes
    main: DeviceId
    packed: frozenset[str] = frozenset()
    computes: Mapping[str, DeviceId] = field(default_factory=dict)
    unpacks: frozenset[DeviceId] = frozenset()
    least_blocks: bool = False


@dataclass(frozen=True, slots=True)
class Shortage:
    """A device whose ``budget`` is less than what must be there, in bytes.

    That is the ``weights`` on it, the ``reserve`` for what is streamed, and the ``slots`` for experts.
    """

    device: DeviceId
    budget: int
    weights: int
    reserve: int
    slots: int

    @property
    def least(self) -> int:
        """The least budget that works, in bytes."""
        return self.weights + self.reserve + self.slots


def budgeted_accelerators(budgets: Budgets) -> list[DeviceId]:
    """Return the accelerators that ``budgets`` let hold something, in order."""
    return [device for device in in_tier_order(budgets) if isinstance(device, int) and budgets[device] != 0]


def main_device(homes: Homes) -> DeviceId:
    """Return the first accelerator in the order of the tiers, or the cpu."""
    return next((device for device in in_tier_order(homes.values()) if isinstance(device, int)), CPU)


def execution_device(outline: Outline, layer: Layer, placement: Placement) -> DeviceId:
    """Return where all modules of ``layer`` compute.

    It is what ``placement`` says of the layer; else the accelerator that holds most of it, or the main device where
    none holds any. What an earlier layer owns (a tied tensor) draws a layer to its device only where the layer has
    nothing of its own.
    """
    if layer.name in placement.computes:
        return placement.computes[layer.name]
    totals: dict[DeviceId, int] = {}
    for leader in outline.drawn_by[layer.name]:
        home = placement.homes[leader]
        totals[home] = totals.get(home, 0) + max(1, outline.sizes[leader])
    accelerators = [device for device in in_tier_order(totals) if isinstance(device, int)]
    return max(accelerators, key=lambda device: totals[device], default=placement.main)


def execution_devices(outline: Outline, placement: Placement) -> dict[str, DeviceId]:
    """Return the device that computes each layer, by the layer's name."""
    return {layer.name: execution_device(outline, layer, placement) for layer in outline.layers}


def resident_bytes(outline: Outline, homes: Homes) -> dict[DeviceId, int]:
    """Return the bytes that lie on each device, in the order of the tiers."""
    totals = dict.fromkeys(in_tier_order(homes.values()), 0)
    for leader, device in homes.items():
        totals[device] += (outline.rest_sizes if device == DISK else outline.sizes)[leader]
    return totals


def held_bytes(outline: Outline, homes: Homes) -> tuple[int, int]:
    """Return the bytes on the accelerators and those on the host: what one placement has before another."""
    totals = resident_bytes(outline, homes)
    return sum(count for device, count in totals.items() if isinstance(device, int)), totals.get(CPU, 0)


def fold(homes: Homes) -> dict[str, DeviceId]:
    """Return the shortest device map that says what ``homes`` of all tensors say: one entry for a module that lies on
    one device.
    """
    devices: dict[str, set[DeviceId]] = {}
    inside: dict[str, dict[str, None]] = {}
    for name, home in homes.items():
        below = ""
        for above in upward(name):
            devices.setdefault(above, set()).add(home)
            if above != name:
                inside.setdefault(above, {})[below] = None
            below = above
    folded: dict[str, DeviceId] = {}
    stack = [""] if homes else []
    while stack:
        name = stack.pop()
        if len(devices[name]) == 1:
            folded[name] = next(iter(devices[name]))
        else:
            stack += reversed(inside[name])
    return folded


def all_homes(outline: Outline, homes: Homes) -> dict[str, DeviceId]:
    """Return the ``homes`` of all names, tied ones included, in the order of execution."""
    return {name: homes[outline.skeleton.leader(name)] for layer in outline.layers for name in layer.tensors}
