"""What a token moves: the bytes that are brought to where they are used, and those that are read where they lie.

Both are read from a layout, line by line. Of a mixture's experts they are expectations: routing is taken as uniform,
which is the worst case for any rule of eviction, since an expert is then in a slot as often as any other of its layer,
once slots are full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from offstage.stages.empty_init.skeleton import parent
from offstage.stages.machine.rates import Rates
from offstage.stages.plan.expert_slots import SINGLE, Routing, hit_rates
from offstage.stages.plan.layout import Layout
from offstage.stages.plan.memory_needs import BlockCache
from offstage.stages.plan.outline import read_on
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.serving import Line
from offstage.stages.plan.token_time import (
    HOST_TOKENS,
    PassTraffic,
    expected_seconds,
    forwards_for_free,
    slowest,
    token_seconds,
)
from offstage.stages.units import CPU, DISK, DeviceId, in_tier_order

_CALLS_A_MIXTURE, _CALLS_A_GROUP, _CALLS_AN_EXPERT, _CALLS_A_PACKED_EXPERT = 4, 0.06, 0.8, 0.6
"""In the time of so many calls of modules the host sorts tokens by the stacked experts of a layer, passes over one of
these, and multiplies by one; and calls one that stays packed, beside its products. Nominal."""


_BESIDE = ("host_read", "crossing")
"""What a forecast has of a token in bytes where the host computes beside accelerators."""


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of decoding, in which each of ``members`` in lockstep has so many ``tokens``, one for every sequence.

    All of them use a mixture's experts as ``routing`` says. Of a member a layer hands ``output_bytes`` to the next; 0:
    so few that they take no time to cross but what any do. One that ``decodes`` isn't the first, and needs nothing that
    only a prompt does. Where ``pages_stay``, what is mapped is in memory then. It is so many ``forwards``, one after
    the other, each over all weights. It makes ``caches`` anew, a token longer, and brings those that wait on the host.
    """

    routing: Routing = SINGLE
    members: int = 1
    tokens: int = 1
    output_bytes: int = 0
    decodes: bool = True
    pages_stay: bool = False
    forwards: int = 1
    caches: tuple[BlockCache, ...] = ()


PLAIN_STEP = Step()
"""One token of one sequence."""


def traffic(layout: Layout, step: Step) -> PassTraffic:
    """Return what ``step`` moves: of experts those that are wanted and in no slot, all of what else is streamed."""
    outline, routing, forwards = layout.outline, step.routing, step.forwards
    total = PassTraffic(
        step.members,
        layout.reserves,
        output_bytes=step.output_bytes,
        host_calls=forwards * calls(layout, routing, on_host=True),
        device_calls=forwards * calls(layout, routing, on_host=False),
        loops=step.decodes and not any(isinstance(device, int) for device in layout.execution.values()),
        computed=computed_bytes(layout, step),
    )
    kept = hit_rates(outline, layout.offloaded_experts, pools=layout.pools, slots=layout.slots, routing=routing)
    on_host = set(layout.layers_on_host(layout.placement.main))
    needed = [(layer, list(lines)) for layer, lines in groupby(_needed(layout, step), key=lambda line: line.layer)]
    for layer, layer_lines in needed * forwards:
        for line in layer_lines:
            if line.serving is None or line.serving == "rows":
                continue
            share, count = routing.share(line.routed), 1
            if line.serving == "experts":
                rate = kept[parent(line.name)]
                total.note_experts(line.computes, line.used * share, line.bytes * share * (1 - rate), rate=rate)
                share, count = share * (1 - rate), outline.experts[parent(line.name)].count
            moved, mapped = layout.moved_bytes(line), line.serving == "map"
            total.add(
                DISK if line.home == DISK and not (step.pages_stay and mapped) else CPU,
                line.bytes * share,
                computes=line.computes,
                unpacked=line.used * share if line.is_unpacked else None,
                moved=None if moved is None else moved * share,
                tensors=share * count,
                ahead=line.routed is None,
                mapped=mapped,
            )
        if layer in on_host:
            total.compute_on_host(_read_bytes(layout, layer_lines, routing))
    if on_host:  # to each of its layers the output of another goes, and its own comes back
        on_cpu = [line for line in layout.lines if line.computes == CPU]
        total.host_read = forwards * _read_bytes(layout, on_cpu, routing)
        total.crossings = 2 * len({line.layer for line in on_cpu}) * forwards
    for cache in step.caches:
        device = layout.block_device(cache.block)
        (total.caches if cache.waits and device != CPU else total.kept)[device] += cache.finished
    total.resident = _held_bytes(layout, step, total)
    total.multiplied = _multiplied_bytes(layout, step)
    total.no_room_beside = forwards * _no_room_beside(layout)
    total.filling = _filling_bytes(layout, routing, kept)
    return total


def _filling_bytes(layout: Layout, routing: Routing, kept: Mapping[str, float]) -> float:
    """Return how much of the host's slots a pass fills that nothing was in before: on average over the run's, after
    what the prompts fill. Each module finds such a share of its experts ``kept``.
    """
    if not routing.passes:
        return 0.0
    outline, size, before, after = layout.outline, layout.slots.get(CPU, 0), 0.0, 0.0
    for module, device in layout.offloaded_experts.items():
        if device == CPU:
            spec, each = outline.experts[module], outline.expert_kinds[module].bytes
            before += each * routing.before(spec)
            after += each * routing.passes * routing.distinct(spec) * (1 - kept[module])
    return (min(size, before + after) - min(size, before)) / routing.passes


def _no_room_beside(layout: Layout) -> int:
    """Return how much the host computes with in a pass while storage has no room to read to: of layers that stream so
    much that staging doesn't hold what comes next beside the largest part, that part.
    """
    parts: dict[str, Counter[str]] = {}
    for line in layout.streamed:
        if line.computes == CPU and line.serving in ("direct", "packed"):
            parts.setdefault(line.layer, Counter())[parent(line.name)] += line.used
    if not parts:
        return 0
    staging = layout.rooms[CPU].staging_bytes(is_main=layout.placement.main == CPU)
    return sum(size for size, needed in read_on([*each.values()] for each in parts.values()) if needed > staging)


def _multiplied_bytes(layout: Layout, step: Step) -> float:
    """Return the bytes that a token multiplies by on the host as they rest, wherever they are until then."""
    multiplied = layout.outline.multiplied
    if not multiplied:  # a search asks for each placement that it tries
        return 0.0
    leaders = {line.leader for line in layout.lines if line.computes == CPU and line.name in multiplied}
    read = (line for line in _needed(layout, step) if line.name in leaders)
    return step.forwards * sum(line.used * step.routing.share(line.routed) for line in read)


def _held_bytes(layout: Layout, step: Step, brought: PassTraffic) -> dict[DeviceId, int]:
    """Return the bytes that a token reads on each device which computes with what it holds; of experts those it uses.

    What waits on the host for an accelerator isn't among them, nor are tables, of which next to nothing is read; what
    is found in slots is, as ``brought`` has it.
    """
    on_host = {line.leader for line in layout.lines if line.computes == CPU}
    used = {device: 0.0 for device in layout.rooms if device != DISK}
    for line in _needed(layout, step):
        elsewhere = line.name != line.leader or line.home == DISK or line.serving == "experts"
        if elsewhere or line.leader in layout.outline.tables:
            continue
        if line.home != CPU or line.leader in on_host:
            used[line.home] += line.bytes * step.routing.share(line.routed) * step.forwards
    for device, count in brought.in_slots.items():
        if device in used:
            used[device] += count
    return {device: round(count) for device, count in used.items()}


def computed_bytes(layout: Layout, step: Step) -> dict[DeviceId, float]:
    """Return the bytes that a member's tokens compute with on each device, each token counted; of tables none.

    Nothing where they are so few that they compute while the weights are read.
    """
    tokens, totals = step.tokens * step.forwards, Counter[DeviceId]()
    if step.tokens <= HOST_TOKENS:
        return {}
    for line in {(line.leader, line.computes): line for line in _needed(layout, step)}.values():
        if line.name not in layout.outline.lookups:
            totals[line.computes] += line.used * SINGLE.share(line.routed) * tokens  # type: ignore[assignment]
    return dict(totals)


def calls(layout: Layout, routing: Routing, *, on_host: bool) -> float:
    """Return how many calls of modules that hold weights a token makes on the host, or on accelerators, or what takes
    the host as long. An accelerator has all stacked experts of a layer computed at once.
    """
    shares = {parent(name): routing.share(experts) for name, experts in layout.outline.listed.items()}
    for name, spec in layout.outline.experts.items():
        share, packed = routing.share((spec.count, spec.per_token)), spec.tensors[0] in layout.outline.multiplied
        each = _CALLS_A_PACKED_EXPERT * share if packed else _CALLS_A_GROUP + _CALLS_AN_EXPERT * share
        shares[name] = _CALLS_A_MIXTURE + (each * spec.count if on_host else 0)
    called = layout.outline.skeleton.calls
    return sum(shares.get(name, 1) for name in called if (layout.execution.get(name, CPU) == CPU) == on_host)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is expected of a step at some ``rates``: what is ``brought``, and the seconds of a token, by what takes them
    in ``terms``.
    """

    rates: Rates
    brought: PassTraffic
    terms: dict[str, float]

    @property
    def seconds(self) -> float:
        """The seconds of a token: what placements are chosen by, and what the plan says."""
        return expected_seconds(self.terms)

    @property
    def link_bytes(self) -> dict[DeviceId, int]:
        """The bytes that go over the link of each accelerator for a token."""
        links = self.brought.links
        return {device: round(links[device] / self.brought.members) for device in in_tier_order(links)}

    @property
    def figures(self) -> dict[str, float | int | str]:
        """What the plan says of it, by name."""
        brought, members = self.brought, self.brought.members
        values: dict[str, float | int | str] = {"streamed_bytes_per_token": round(brought.bytes / members)}
        if brought.unpacked:
            values["quantised_bytes_per_token"] = round(brought.packed / members)
            values["dequantised_bytes_per_token"] = round(brought.unpacked / members)
        if brought.multiplied:
            values["multiplied_bytes_per_token"] = round(brought.multiplied)
        if brought.moved:
            values["device_dequantised_bytes_per_token"] = round(brought.unpacked_there / members)
            values["device_moved_bytes_per_token"] = round(brought.moved.total() / members)
        if brought.hit_rate is not None:
            values["expert_bytes_per_token"] = round(brought.expert_bytes / members)
            values["expert_hit_rate"] = round(brought.hit_rate, 4)
        if brought.caches:
            values["cache_bytes_per_token"] = round(brought.caches.total() / members)
        if brought.host_read is not None:
            values["host_read_bytes_per_token"] = round(brought.host_read)
            values["crossing_bytes_per_token"] = brought.crossings * brought.output_bytes
            values["crossings_per_token"] = brought.crossings
        values |= {"seconds_per_token": self.seconds, "bottleneck": slowest(self.terms)[0]}
        if brought.bytes:
            values["forwards_for_free"] = round(forwards_for_free(self.terms, members), 2)
        if brought.at_rest.get(DISK):
            values["storage_bandwidth_bytes_per_second"] = self.rates.storage
        return values


def forecast(layout: Layout, step: Step, rates: Rates) -> Forecast:
    """Return what is expected of ``step`` where weights lie as ``layout`` says: the one answer to how long it takes."""
    brought = traffic(layout, step)
    return Forecast(rates, brought, token_seconds(brought, rates))


def lower_bound_seconds(plan: Plan, *, streamed_bytes: float, storage_bytes: float, members: float = 1) -> float:
    """Return the least seconds of a token in a pass for which so much was streamed, ``storage_bytes`` of it read.

    A pass has a token for each of ``members``. The rates are those that ``plan`` was made with.
    """
    expected = float(plan.forecast.get("streamed_bytes_per_token", 0))
    share = streamed_bytes / expected if expected else 0.0
    packed, unpacked, unpacked_there, moved = (
        float(plan.forecast.get(f"{kind}_bytes_per_token", 0)) * share
        for kind in ("quantised", "dequantised", "device_dequantised", "device_moved")
    )
    streamed = Counter({DISK: storage_bytes, CPU: streamed_bytes - storage_bytes})
    links = {device: one.transfer_bytes for device, one in plan.devices.items() if one.transfer_bytes}
    over_links = sum(links.values())
    shares = {device: count / over_links for device, count in links.items() if over_links}
    used = streamed_bytes - packed + unpacked
    computed = Counter({device: used * of_all for device, of_all in (shares or {CPU: 1.0}).items()})
    less = max(0.0, used - over_links * share) if moved else 0.0
    saved = Counter({device: less * of_all for device, of_all in shares.items()})
    ahead = 1 - float(plan.forecast.get("expert_bytes_per_token", 0)) / expected if expected else 1.0
    total = PassTraffic(
        members, resident=plan.used_bytes, at_rest=streamed, packed=packed, unpacked=unpacked, used=computed
    )
    total.unpacked_there, total.saved = unpacked_there, saved
    total.multiplied = float(plan.forecast.get("multiplied_bytes_per_token", 0))
    total.moved = Counter({device: moved * of_all for device, of_all in shares.items()})
    total.runs = [(device, count * ahead) for device, count in computed.items()]
    total.caches[plan.main_device] = round(float(plan.forecast.get("cache_bytes_per_token", 0)) * members)
    if plan.host_layers:
        total.host_read, crossing = (float(plan.forecast.get(f"{name}_bytes_per_token", 0)) for name in _BESIDE)
        total.crossings = int(plan.forecast.get("crossings_per_token", 0))
        total.output_bytes = round(crossing / total.crossings) if total.crossings else 0
    return slowest(token_seconds(total, plan.known_rates))[1]


def _needed(layout: Layout, step: Step) -> Iterable[Line]:
    """Return the lines of what ``step`` needs: of an encoder's nothing after the first pass."""
    once = frozenset(layout.outline.skeleton.once) if step.decodes else frozenset()
    return (line for line in layout.lines if parent(line.name) not in once) if once else layout.lines


def _read_bytes(layout: Layout, lines: Iterable[Line], routing: Routing) -> float:
    """Return what a pass reads of ``lines`` where they lie: of tables, looked up by rows, next to nothing."""
    tables = layout.outline.lookups
    return sum(line.used * routing.share(line.routed) for line in lines if line.name not in tables)
