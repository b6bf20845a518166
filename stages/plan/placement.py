"""Where every tensor lies, and what follows from it: where modules compute, what is streamed, and the reserve.

What is streamed, ``serving`` says. Each device that computes streamed tensors keeps room for them: the reserve. It is
as large as the largest layer of them, so that what comes next is on its way while one part computes. Where the budget
doesn't leave that, it is what it leaves, and at the least the tensors of one module, where those of a layer aren't
wanted together. Of a mixture's experts a device that computes some which lie elsewhere needs room for a slot or two,
however many a layer has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from offstage.stages.empty_init.skeleton import DeviceUnpacking, parent, upward
from offstage.stages.plan.expert_slots import LEAST, ROOMY, pools, read_bytes
from offstage.stages.plan.lasting_parts import place_lasting
from offstage.stages.plan.outline import Layer, Outline
from offstage.stages.plan.row_blocks import least_sizes
from offstage.stages.plan.serving import Serving, is_offstage, is_streamed, is_unpacked, serving_of, waits_on
from offstage.stages.plan.token_time import Brought
from offstage.stages.units import CPU, DEVICE_ALIGNMENT, DISK, DeviceId, in_tier_order

Budgets = Mapping[DeviceId, int | None]
"""Bytes of weights that each device may hold; None is unlimited, a device that isn't listed holds nothing."""

_Reserves = tuple[dict[DeviceId, int], Mapping[DeviceId, int]]

Homes = Mapping[str, DeviceId]
"""Leader of a tied group, or a tensor's own name → the device where it lies."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What a policy decides: the ``homes`` of all leaders, and the ``main`` device, which computes what is streamed.

    Of those on the host some lie there ``packed``: as they rest on disk, to be unpacked for each use. ``computes`` has
    the layers, by name, that compute elsewhere than ``execution_device`` would have them by where their tensors lie.
    Accelerators that are among ``unpacks`` unpack there what comes to them packed, where they have the room.
    """

    homes: Homes
    main: DeviceId
    packed: frozenset[str] = frozenset()
    computes: Mapping[str, DeviceId] = field(default_factory=dict)
    unpacks: frozenset[DeviceId] = frozenset()


@dataclass(frozen=True, slots=True)
class Shortage:
    """A device whose ``budget`` is less than what must be there, in bytes.

    That is the weights ``held`` on it, the reserve ``kept`` for what is streamed, and the ``slots`` for experts.
    """

    device: DeviceId
    budget: int
    held: int
    kept: int
    slots: int

    @property
    def least(self) -> int:
        """The least budget that works, in bytes."""
        return self.held + self.kept + self.slots


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
    held: dict[DeviceId, int] = {}
    for leader in outline.drawn_by[layer.name]:
        home = placement.homes[leader]
        held[home] = held.get(home, 0) + max(1, outline.sizes[leader])
    accelerators = [device for device in in_tier_order(held) if isinstance(device, int)]
    return max(accelerators, key=lambda device: held[device], default=placement.main)


def execution_devices(outline: Outline, placement: Placement) -> dict[str, DeviceId]:
    """Return the device that computes each layer, by the layer's name."""
    return {layer.name: execution_device(outline, layer, placement) for layer in outline.layers}


def reserves(outline: Outline, placement: Placement, budgets: Budgets) -> dict[DeviceId, int]:
    """Return the bytes that each device keeps free which computes what is streamed.

    That is a layer's, or what ``budgets`` leave beside the weights and a slot, if that is less; but at the least what
    is in use at once.
    """
    held, slots = resident_bytes(outline, placement.homes, placement.packed), least_slots(outline, placement)
    kept, found = _reserves(outline, placement, outline.sizes), dict[DeviceId, int]()
    for device, count in kept[0].items():
        budget = budgets.get(device)
        left = count if budget is None else budget - held.get(device, 0) - slots.get(device, 0)
        found[device] = min(count, left)
    least = _least(outline, placement, kept, rooms=found)
    return {device: max(least[device], count) for device, count in found.items()}


def layer_reserves(outline: Outline, placement: Placement) -> dict[DeviceId, int]:
    """Return the bytes of the largest streamed layer on each device that computes one, and what is there beside it."""
    return _reserves(outline, placement, outline.sizes)[0]


def _least(
    outline: Outline, placement: Placement, kept: _Reserves, *, rooms: Mapping[DeviceId, int | None]
) -> Mapping[DeviceId, int]:
    """Return the least that each device can keep, of ``kept`` where all ``rooms`` (null is unlimited) have it.

    Where one hasn't, parts of what is divisible are blocks of rows: no sooner is it asked what is.
    """
    layers, parts = kept
    fits = all((room := rooms[device]) is None or count <= room for device, count in parts.items())
    return parts if fits or parts is layers else _reserves(outline, placement, least_sizes(outline))[1]


def _reserves(outline: Outline, placement: Placement, sizes: Mapping[str, int]) -> _Reserves:
    """Return the bytes of the largest layer that each device computes of what is streamed, and the least it can keep.

    That is the largest part, where each is alone while its module runs: a part is what one module holds, so much of
    each tensor at once as ``sizes`` say; where several are there together, it is what these take. Where no rehearsal
    saw how it is, and where experts are modules in a list, it is as much as for a layer. What is there beside a layer
    counts.
    """
    layers: Counter[DeviceId] = Counter()
    whole: dict[str, Counter[DeviceId]] = {}
    parts: dict[str, Counter[DeviceId]] = whole if sizes is outline.sizes else {}
    for layer in outline.layers:
        device = execution_device(outline, layer, placement)
        streamed = _streamed(outline, layer, placement, device)
        if not streamed:
            continue
        layers[device] = max(layers[device], _at_once(outline, set(map(outline.skeleton.leader, streamed))))
        for name in streamed:
            module = parent(name)
            if module not in whole:
                whole[module] = Counter()
            whole[module][device] += outline.sizes[name]
            if parts is not whole:
                divided = sizes[name] < outline.sizes[name]
                parts.setdefault(name if divided else module, Counter())[device] += sizes[name]
    layers = +layers
    if outline.skeleton.unrehearsed is not None:
        return layers, layers
    layers = _largest([layers, *whole.values()])  # a module that isn't kept whole is a layer for each of its tensors
    beside = _beside(outline, whole)
    together = _least_staging(outline, whole) if beside else _largest(whole.values())
    kept = (layers + beside) | together
    if outline.listed:
        return kept, kept
    return kept, _least_staging(outline, parts) if parts.keys() - whole.keys() else together


def _largest(counts: Iterable[Mapping[DeviceId, int]]) -> Counter[DeviceId]:
    """Return the most that one of ``counts`` has on each device. (Placements are tried by thousands, of ten thousand
    parts: as many new counters take most of a plan's time.)
    """
    found: Counter[DeviceId] = Counter()
    for sizes in counts:
        for device, size in sizes.items():
            if size > found[device]:
                found[device] = size
    return +found


def _beside(outline: Outline, parts: Mapping[str, Counter[DeviceId]]) -> Counter[DeviceId]:
    """Return the most bytes of streamed ``parts`` that are there together, beside the largest, on each device.

    A part is there while its module runs, or one that borrows its weights; those of modules around that are there too.
    """
    callers: dict[str, list[Counter[DeviceId]]] = {}
    for module, sizes in parts.items():
        for caller in (module, *outline.skeleton.borrowers.get(module, ())):
            callers.setdefault(caller, []).append(sizes)
    found: Counter[DeviceId] = Counter()
    for caller in callers:
        around = outline.around[caller]
        if len(around) == len(callers[caller]) == 1:
            continue
        running = [sizes for above in around for sizes in callers.get(above, ())]
        for device in set().union(*running) if len(running) > 1 else ():
            together = [sizes[device] for sizes in running]
            found[device] = max(found[device], sum(together) - max(together))
    return +found


def _least_staging(outline: Outline, parts: Mapping[str, Counter[DeviceId]]) -> Counter[DeviceId]:
    """Return the least bytes that hold whatever is there at once of streamed ``parts``, on each device.

    Each begins where that device has parts begin; what rests of the host's is on top of its staging memory.
    """
    by_device: dict[DeviceId, dict[str, int]] = {}
    for name, sizes in parts.items():
        for device, size in sizes.items():
            by_device.setdefault(device, {})[name] = size
    return Counter(
        {
            device: place_lasting(
                {name: (name, *outline.skeleton.borrowers.get(name, ())) for name in sizes},
                sizes,
                alignment=1 if device == CPU else DEVICE_ALIGNMENT,
            ).least
            for device, sizes in by_device.items()
        }
    )


def _at_once(outline: Outline, leaders: Iterable[str]) -> int:
    """Return the most bytes of the tensors ``leaders`` of one layer that there must be room for at once.

    Experts that are modules in a list are called one after the other: two may be there.
    """
    whole, experts = 0, Counter[str]()
    for leader in leaders:
        if leader in outline.listed:
            experts[outline.skeleton.expert_of[parent(leader)]] += outline.sizes[leader]
        else:
            whole += outline.sizes[leader]
    return whole + sum(sorted(experts.values())[-ROOMY:])


def _streamed(outline: Outline, layer: Layer, placement: Placement, device: DeviceId) -> dict[str, Serving]:
    """Return how each tensor of ``layer`` is served that is streamed to ``device``."""
    served = {
        name: serving_of(outline, name, placement.homes, computes=device, packed=placement.packed)
        for name in layer.tensors
    }
    return {name: serving for name, serving in served.items() if serving is not None and is_streamed(serving)}


def offstage(outline: Outline, placement: Placement) -> dict[str, DeviceId]:
    """Return the modules whose experts lie elsewhere than where they compute, and where they compute."""
    computing = {
        module: execution_device(outline, outline.layer_of[experts.tensors[0]], placement)
        for module, experts in outline.experts.items()
    }
    return {
        module: device
        for module, device in computing.items()
        if is_offstage(outline.experts[module], placement.homes, placement.packed, computes=device)
    }


def least_slots(outline: Outline, placement: Placement, count: int = LEAST) -> dict[DeviceId, int]:
    """Return the bytes of ``count`` slots on each device that computes experts which lie elsewhere."""
    found = pools(outline, offstage(outline, placement))
    return {device: min(count * pool.unit_bytes, pool.bytes) for device, pool in found.items()}


def kept_free(outline: Outline, placement: Placement, slots: int = LEAST) -> dict[DeviceId, int]:
    """Return the bytes that each device is to keep free of weights: a layer's reserve, and so many ``slots``."""
    kept, least = layer_reserves(outline, placement), least_slots(outline, placement, slots)
    return {device: kept.get(device, 0) + least.get(device, 0) for device in {**kept, **least}}


def streamed_bytes(outline: Outline, placement: Placement) -> Brought:
    """Return the bytes that are brought in for each token. Each use of a tied tensor counts.

    Of experts in lists those count that a token uses.
    """
    found = Brought()
    for layer in outline.layers:
        device = execution_device(outline, layer, placement)
        for name, serving in _streamed(outline, layer, placement, device).items():
            count, used = outline.listed.get(name, (1, 1))
            packed = is_unpacked(outline, name, serving)
            size = (outline.rest_sizes if packed else outline.sizes)[name] * used // count
            unpacked = outline.sizes[name] * used // count if packed else None
            ahead = name not in outline.listed
            moved = outline.moved_bytes(name, device) if packed else None
            moved = None if moved is None else moved * used // count
            found.add(
                waits_on(serving),
                size,
                computes=device,
                unpacked=unpacked,
                moved=moved,
                tensors=used / count,
                ahead=ahead,
            )
        if device == CPU != placement.main:
            found.compute_on_host(read_bytes(outline, layer.tensors))
    return found


def unpacking_rooms(outline: Outline, placement: Placement) -> dict[DeviceId, int]:
    """Return the bytes by which each accelerator could unpack what comes to it packed."""
    found: dict[DeviceId, list[DeviceUnpacking]] = {}
    for layer in outline.layers if outline.packed else ():
        device = execution_device(outline, layer, placement)
        for name in layer.tensors:
            leader, packed = outline.skeleton.leader(name), outline.packed.get(name)
            rests = placement.homes[leader] == DISK or leader in placement.packed
            if device != CPU and rests and packed and packed.device:
                found.setdefault(device, []).append(packed.device)
    return {
        device: sum(
            max(getattr(one, part) for one in needs) for part in ("landing_bytes", "scratch_bytes", "table_bytes")
        )
        for device, needs in found.items()
    }


def computed_bytes(outline: Outline, placement: Placement, *, without: Collection[str] = ()) -> dict[DeviceId, int]:
    """Return the bytes on each device that computes with what it holds, ``without`` some tensors.

    What waits on the host for an accelerator isn't among them, nor are tables, of which next to nothing is read.
    """
    computing = execution_devices(outline, placement)
    host = (layer.tensors for layer in outline.layers if computing[layer.name] == CPU)
    used = {outline.skeleton.leader(name) for tensors in host for name in tensors}
    homes = {
        leader: home
        for leader, home in placement.homes.items()
        if home != DISK and leader not in without and leader not in outline.tables and (home != CPU or leader in used)
    }
    return resident_bytes(outline, homes, placement.packed)


def resident_bytes(outline: Outline, homes: Homes, packed: Collection[str] = ()) -> dict[DeviceId, int]:
    """Return the bytes that lie on each device, in the order of the tiers; on the host some lie ``packed``."""
    held = dict.fromkeys(in_tier_order(homes.values()), 0)
    for leader, device in homes.items():
        sizes = outline.rest_sizes if device == DISK or (device == CPU and leader in packed) else outline.sizes
        held[device] += sizes[leader]
    return held


def held_bytes(outline: Outline, homes: Homes) -> tuple[int, int]:
    """Return the bytes on the accelerators and those on the host: what one placement has before another."""
    held = resident_bytes(outline, homes)
    return sum(count for device, count in held.items() if isinstance(device, int)), held.get(CPU, 0)


def find_shortage(
    outline: Outline, placement: Placement, budgets: Budgets, *, slots: int = LEAST, tight: bool = False
) -> Shortage | None:
    """Return the first device that can't hold its weights, its reserve and so many ``slots``; null where all can.

    The reserve is a layer's; if ``tight``, the least. A device that ``budgets`` doesn't list holds nothing, except that
    disk is then unlimited.
    """
    held, least = resident_bytes(outline, placement.homes, placement.packed), least_slots(outline, placement, slots)
    streamed, rooms = _reserves(outline, placement, outline.sizes), dict[DeviceId, int | None]()
    for device in in_tier_order([*held, *streamed[0], *least]):
        budget = budgets.get(device, None if device == DISK else 0)
        rooms[device] = None if budget is None else budget - held.get(device, 0) - least.get(device, 0)
    kept = _least(outline, placement, streamed, rooms=rooms) if tight else streamed[0]
    for device, room in rooms.items():
        if room is not None and kept.get(device, 0) > room:
            found = held.get(device, 0), kept.get(device, 0), least.get(device, 0)
            return Shortage(device, budgets.get(device) or 0, *found)
    return None


def fold(outline: Outline, homes: Homes) -> dict[str, DeviceId]:
    """Return the shortest device map that says what ``homes`` says: one entry for a module that lies on one device."""
    devices: dict[str, set[DeviceId]] = {name: set() for name in outline.names}
    for name in outline.sizes:
        home = homes[outline.skeleton.leader(name)]
        for above in upward(name):
            devices[above].add(home)
    folded: dict[str, DeviceId] = {}
    stack = [""]
    while stack:
        name = stack.pop()
        if len(devices[name]) == 1:
            folded[name] = next(iter(devices[name]))
        elif devices[name]:
            stack += reversed(outline.direct[name] + outline.children[name])
    return folded
