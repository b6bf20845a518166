"""The layout: where every tensor of a placement lies, how it gets to where it computes, what each device has room for.

It is made by one walk over the layers, and everything else that is said of a placement is read from it: what a token
brings (``traffic``), what each device holds at its peak (``ledger``), whether budgets can hold it, and the plan.

Each device that computes streamed tensors keeps room for them: the reserve. It is as large as the largest layer of
them, so that what comes next is on its way while one part computes. Where the budget doesn't leave that, it is what it
leaves, and at the least the tensors of one module, where those of a layer aren't wanted together. Of a mixture's
experts a device that computes some which lie elsewhere needs room for a slot or two, however many a layer has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from offstage.stages.empty_init.skeleton import DeviceUnpacking, parent
from offstage.stages.plan.expert_slots import LEAST, Pool, pools, slot_bytes
from offstage.stages.plan.outline import Layer, Outline, most_unpacking_bytes
from offstage.stages.plan.placement import Budgets, Placement, Shortage, execution_devices
from offstage.stages.plan.reserves import block_rows, least_sizes, needed_rooms
from offstage.stages.plan.serving import Io, Line, Serving, TensorTable, is_streamed
from offstage.stages.units import CPU, DISK, DeviceId, in_tier_order

Counts = Mapping[DeviceId, int]


@dataclass(frozen=True, slots=True)
class Room:
    """What one device has room for, in bytes: of its ``budget`` (null: unlimited) the ``weights`` that lie there, the
    ``reserve`` for what is streamed, the ``expert_cache``, and what it is ``dequantising`` by.
    """

    budget: int | None
    weights: int
    reserve: int = 0
    expert_cache: int = 0
    dequantising: int = 0

    def staging_bytes(self, *, is_main: bool) -> int:
        """Return the bytes that the host may hold for streamed weights where it computes some: all, if it ``is_main``.

        They are its reserve, and what is left of its budget, the expert cache aside.
        """
        if self.budget is None or not (self.reserve or is_main):
            return self.reserve
        return max(self.reserve, self.budget - self.weights - self.expert_cache)


@dataclass(frozen=True)
class Layout(TensorTable):
    """The ``lines`` of ``placement``, in the order of execution, and what follows from them under ``budgets``.

    A device that ``budgets`` doesn't list holds nothing, except that disk is then unlimited.
    """

    outline: Outline
    placement: Placement
    lines: tuple[Line, ...]
    budgets: Budgets = field(default_factory=dict)

    @cached_property
    def tensors(self) -> dict[str, Line]:
        """The lines by the tensors' names."""
        return {line.name: line for line in self.lines}

    @cached_property
    def weights(self) -> dict[DeviceId, int]:
        """The bytes that lie on each device, in the order of the tiers; tied tensors count once."""
        totals = dict.fromkeys(in_tier_order(line.home for line in self.lines), 0)
        for line in self.lines:
            totals[line.home] += line.bytes if line.name == line.leader else 0
        return totals

    @cached_property
    def streamed(self) -> tuple[Line, ...]:
        """Those of which all is brought in for each use."""
        return tuple(line for line in self.lines if line.is_streamed)

    @cached_property
    def offloaded_experts(self) -> dict[str, DeviceId]:
        """The modules whose experts are brought one by one, and where they compute."""
        return {parent(line.name): line.computes for line in self.lines if line.serving == "experts"}

    @cached_property
    def pools(self) -> dict[DeviceId, Pool]:
        """What slots are for on each device that computes experts which lie elsewhere."""
        return pools(self.outline, self.offloaded_experts)

    def least_slots(self, count: int = LEAST) -> dict[DeviceId, int]:
        """Return the bytes of ``count`` slots of each kind on each device that has some."""
        return {device: min(count * pool.unit_bytes, pool.bytes) for device, pool in self.pools.items()}

    @property
    def layer_reserves(self) -> Counts:
        """The bytes of the largest streamed layer on each device that computes one, and what is there beside it."""
        return self._at_once[0]

    def kept_free(self, slots: int = LEAST) -> dict[DeviceId, int]:
        """Return the bytes that each device is to keep free of weights: a layer's reserve, and so many ``slots``."""
        computed = Counter({CPU: self._made_there})
        return dict(Counter(self.layer_reserves) + Counter(self.least_slots(slots)) + computed)

    def shortage(self, *, slots: int = LEAST, tight: bool = False) -> Shortage | None:
        """Return the first device that can't hold its weights, its reserve and so many ``slots``; null where all can.

        The reserve is a layer's; if ``tight``, the least.
        """
        reserves, least = self.layer_reserves, self.least_slots(slots)
        rooms = {device: self.left(device, least) for device in in_tier_order([*self.weights, *reserves, *least])}
        reserves = self._least_reserves(rooms) if tight else reserves
        for device, room in rooms.items():
            if room is not None and reserves.get(device, 0) > room:
                needs = self.weights.get(device, 0), reserves.get(device, 0), least.get(device, 0)
                return Shortage(device, self.budgets.get(device) or 0, *needs)
        return None

    def left(self, device: DeviceId, beside: Counts) -> int | None:
        """Return what the budget of ``device`` leaves beside the weights that lie there and what else is ``beside``.

        That is less than 0 where these are too much; null: no limit.
        """
        budget = self.budgets.get(device, None if device == DISK else 0)
        if budget is None:
            return None
        weights = self.weights.get(device, 0)
        if device == CPU and not budget:  # that no weights are to lie there is no reason to refuse what code makes
            weights -= self._made_there
        return budget - weights - beside.get(device, 0)

    @cached_property
    def reserves(self) -> dict[DeviceId, int]:
        """The bytes that each device keeps free which computes what is streamed.

        That is a layer's, or what the budget leaves beside the weights and a slot, if that is less; but at the least
        what is in use at once.
        """
        slots = self.least_slots()
        reserves = {
            device: count if device not in self.budgets or self.budgets[device] is None
            else min(count, self.left(device, slots) or 0)
            for device, count in self.layer_reserves.items()
        }  # fmt: skip
        least = self._least_reserves(reserves)
        return {device: max(least[device], count) for device, count in reserves.items()}

    @cached_property
    def unpacking(self) -> dict[DeviceId, int]:
        """The bytes by which accelerators unpack that are to, where their budgets leave them."""
        slots = Counter(self.least_slots()) + Counter(self.reserves)
        wanted = self.unpacking_rooms if self.placement.unpacks else {}
        lefts = {device: self.left(device, slots) for device in wanted}
        return {
            device: room
            for device, room in wanted.items()
            if device in self.placement.unpacks and ((left := lefts[device]) is None or room <= left)
        }

    @cached_property
    def unpacking_rooms(self) -> dict[DeviceId, int]:
        """The bytes by which each accelerator could unpack what comes to it packed."""
        needs_of: dict[DeviceId, list[DeviceUnpacking | None]] = {}
        for line in self.lines if self.outline.packed else ():
            packed = self.outline.packed.get(line.name)
            if line.at_rest and line.computes != CPU and packed and packed.device:
                needs_of.setdefault(line.computes, []).append(packed.device)
        return {device: most_unpacking_bytes(needs) for device, needs in needs_of.items()}

    def moved_bytes(self, line: Line) -> int | None:
        """Return what a device moves in its memory to unpack the tensor; null where the host unpacks it, or nobody."""
        packed = self.outline.packed[line.name].device if line.is_unpacked else None
        return packed.moved_bytes if packed and line.computes in self.unpacking else None

    @cached_property
    def slots(self) -> dict[DeviceId, int]:
        """The bytes of slots on each device that computes experts which lie elsewhere: what its budget leaves."""
        beside, slots = Counter(self.reserves) + Counter(self.unpacking), {}
        read = [line for line in self.lines if line.serving in ("direct", "packed")]
        unpacked = any(line.home == DISK and line.at_rest for line in read)
        staged = self.outline.read_ahead_bytes((line.name for line in read), unpacked=unpacked)
        for device, pool in self.pools.items():
            ahead = max(0, staged - beside[device]) if device == CPU else 0
            slots[device] = slot_bytes(pool, self.left(device, beside), staged=ahead)
        return slots

    @cached_property
    def rooms(self) -> dict[DeviceId, Room]:
        """What every device has room for that has a budget, or holds something, and the host."""
        counts_of = (self.reserves, self.slots, self.unpacking)
        main = self.placement.main
        return {
            device: Room(
                self.budgets.get(device), self.weights.get(device, 0), *(counts.get(device, 0) for counts in counts_of)
            )
            for device in in_tier_order([*self.budgets, *self.weights, *self.reserves, *self.slots, main, CPU])
        }

    @cached_property
    def block_rows(self) -> dict[str, int]:
        """How many rows of a weight come at a time, of those that not even the reserve can hold whole."""
        brought = [line.name for line in self.lines if line.serving in ("direct", "copy", "packed")]
        least = self.placement.least_blocks
        return block_rows(self.outline, brought, self.execution, self.reserves, least=least)

    def block_device(self, block: str) -> DeviceId:
        """Return where ``block`` computes; what has no weights does so on the main device."""
        inside = (self.tensors[tensor].computes for tensor in self.outline.below(block))
        return next(inside, self.placement.main)

    @cached_property
    def _made_there(self) -> int:
        """The bytes of buffers on the host that the placement has on disk: no checkpoint has them, code made them."""
        return sum(line.bytes for line in self.lines if line.made and line.name == line.leader)

    @cached_property
    def _at_once(self) -> tuple[Counts, Counts]:
        """What each device needs room for of what is streamed: a layer's, and the least that works."""
        return needed_rooms(self.outline, self.streamed, self.outline.sizes)

    def _least_reserves(self, rooms: Mapping[DeviceId, int | None]) -> Counts:
        """Return the least that each device can keep, of what all ``rooms`` (null is unlimited) have.

        Where one hasn't, parts of what is divisible are blocks of rows: no sooner is it asked what is.
        """
        layers, parts = self._at_once
        fits = all((room := rooms[device]) is None or count <= room for device, count in parts.items())
        if fits or parts is layers:
            return parts
        return needed_rooms(self.outline, self.streamed, least_sizes(self.outline))[1]


def lay_out(
    outline: Outline,
    placement: Placement,
    budgets: Budgets | None = None,
    *,
    io: Io = "direct",
    homes: Mapping[str, DeviceId] | None = None,
    execution: Mapping[str, DeviceId] | None = None,
    apart: Collection[str] = (),
) -> Layout:
    """Return the layout of ``placement``: the one walk over what every tensor's line is.

    What the host reads from disk is read by ``io``. The ``homes`` of names that aren't their leader's, and an
    ``execution`` of modules that isn't that of their layers, are those of a map that is followed to the letter. What is
    kept ``apart`` on the host is brought for each use where the host computes, too.
    """
    computing = execution_devices(outline, placement) if execution is None else {}
    lines: list[Line] = []
    for layer in outline.layers:
        if execution is None and homes is None and not apart:
            lines += _lines_again(outline, layer, placement, computing[layer.name], io)
        else:
            where = execution or dict.fromkeys(map(parent, layer.tensors), computing[layer.name])
            lines += _lines(outline, layer, placement, where, io=io, homes=homes or placement.homes, apart=apart)
    return Layout(outline, placement, tuple(lines), budgets or {})


def _lines_again(outline: Outline, layer: Layer, placement: Placement, computes: DeviceId, io: Io) -> Sequence[Line]:
    """Return the lines of ``layer`` as ``placement`` has it. (Of the placements that are tried, thousands by some ten
    thousand tensors, most have most layers as another had them.)
    """
    leaders = outline.leaders_of[layer.name]
    homes = tuple(map(placement.homes.__getitem__, leaders))
    key = layer.name, computes, io, homes, placement.packed and placement.packed.intersection(leaders)
    lines = outline.lines.get(key)
    if lines is None:
        where = dict.fromkeys(map(parent, layer.tensors), computes)
        lines = outline.lines[key] = _lines(outline, layer, placement, where, io=io, homes=placement.homes, apart=())
    return lines


def _lines(
    outline: Outline,
    layer: Layer,
    placement: Placement,
    execution: Mapping[str, DeviceId],
    *,
    io: Io,
    homes: Mapping[str, DeviceId],
    apart: Collection[str],
) -> list[Line]:
    """Return the lines of ``layer``, whose modules compute as ``execution`` says; see ``lay_out``."""
    lines = []
    for name in layer.tensors:
        leader, computes = outline.skeleton.leader(name), execution[parent(name)]
        home = homes[name] if name in homes else homes[leader]
        made = home == DISK and name in outline.computed
        # No checkpoint has it: it is where the constructor made it.
        home = CPU if made else home
        rests = home == DISK or (home == CPU and leader in placement.packed)
        packed = outline.packed.get(name) if rests else None
        served = _serving(outline, name, home, computes, io=io, homes=homes, packed=placement.packed)
        lines.append(
            Line(
                name=name,
                home=home,
                computes=computes,
                bytes=(outline.rest_sizes if rests else outline.sizes)[name],
                used=outline.sizes[name],
                leader=leader,
                layer=layer.name,
                serving="copy" if served is None and name in apart else served,
                codec=packed.codec if packed else None,
                made=made,
                routed=None if name in outline.expert_tensors and is_streamed(served) else outline.routed.get(name),
            )
        )
    return lines


def _serving(
    outline: Outline,
    name: str,
    home: DeviceId,
    computes: DeviceId,
    *,
    io: Io,
    homes: Mapping[str, DeviceId],
    packed: Collection[str],
) -> Serving | None:
    """Return how the tensor ``name`` gets from its ``home`` to where it ``computes``; null where it is resident.

    Experts are brought one by one if all of their tensors lie elsewhere or ``packed``. Where a map keeps some of them,
    the others are streamed whole: an expert is brought with all it has, or not.
    """
    rests_here = home == CPU and outline.skeleton.leader(name) in packed
    if home == computes and not rests_here:
        return None
    if name in outline.expert_tensors:
        tensors = outline.experts[parent(name)].tensors
        if all(homes[other] != computes or other in packed for other in tensors):
            return "experts"
    if home != DISK:
        return "packed" if rests_here else "copy"
    if computes != CPU:
        return "direct"
    if name in outline.lookups:
        return "rows"
    return "map" if io == "mmap" and name not in outline.packed else "direct"
