"""The slots of a mixture: how many experts a device can keep that lie elsewhere, and what tokens then bring.

Each device that computes such experts has one pool of memory, cut into slots for one expert. Experts of one kind, whose
tensors are of the same shapes, can lie in each other's slots; where a mixture has several kinds, each has that part of
the pool which it is of all of the experts. What a token brings is an expectation. Routing is taken as uniform, which is
the worst case for any rule of eviction: an expert is then in a slot as often as any other of its layer. Where a run has
measured how often, that counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from stages.empty_init.skeleton import ExpertsSpec
from stages.plan.expert_banks import kept_share, wanted
from stages.plan.outline import ExpertKind, Outline
from stages.plan.serving import Serving
from stages.plan.token_time import Brought
from stages.units import DISK, DeviceId

ROOMY, LEAST = 2, 1
"""The slots of each kind that one is read into while the other computes, and those that suffice."""

_STEP = 32
"""Measured rates of hits are kept by the share of experts that have slots, in as many steps."""

Offstage = Mapping[str, DeviceId]
"""Module whose experts lie elsewhere than where they compute → where they compute."""


@dataclass(frozen=True, slots=True)
class Pool:
    """What the slots of one device are for: so many ``experts``, of so many ``bytes`` together.

    With ``unit_bytes`` each kind has a slot at least: where there is one kind they are the bytes of an expert.
    """

    experts: int
    bytes: int
    unit_bytes: int

    def fitting(self, room: int | None) -> int:
        """Return the bytes of the slots that fit into ``room`` bytes, at most one for each expert; null is no limit."""
        return self.bytes if room is None or room >= self.bytes else max(0, room) // self.unit_bytes * self.unit_bytes

    def count(self, slots: int) -> int:
        """Return how many experts have a place in so many bytes of ``slots``."""
        return slots * self.experts // self.bytes


@dataclass(frozen=True, slots=True)
class Routing:
    """How many ``tokens`` a pass of decoding has, and how often runs found their experts in slots.

    ``hit_rates`` are by ``rate_key``.
    """

    tokens: int = 1
    hit_rates: Mapping[str, float] = field(default_factory=dict)

    def distinct(self, experts: ExpertsSpec) -> float:
        """Return how many different experts the tokens of a pass are expected to use."""
        return wanted(experts.count, experts.per_token, self.tokens)

    def share(self, count: int, per_token: int) -> float:
        """Return which share of ``count`` experts the tokens of a pass are expected to use."""
        return wanted(count, per_token, self.tokens) / count

    def measured(self, pool: Pool, slots: int) -> float | None:
        """Return which share of the experts that are wanted runs found in so many bytes of ``slots``, if any did."""
        return 1.0 if slots == pool.bytes else self.hit_rates.get(rate_key(pool, slots, self.tokens))


SINGLE = Routing()
"""One token a pass, of which nothing was measured."""


@dataclass(frozen=True, slots=True)
class ExpertTraffic:
    """The bytes of experts that a pass is expected to bring, by where they wait; and to find where they compute.

    What lies there anyway, and not in a slot, is ``resident``.
    """

    brought: Brought
    found: Mapping[DeviceId, float]
    resident: Mapping[DeviceId, float]

    @property
    def hit_rate(self) -> float:
        """The share of what isn't resident that is in slots."""
        found, brought = sum(self.found.values()), self.brought.used
        return found / (found + brought) if found + brought else 0.0


def rate_key(pool: Pool, slots: int, tokens: int) -> str:
    """Return what a rate of hits is kept by: the share of experts in ``slots`` bytes, coarsely, and tokens a pass."""
    return f"{round(_STEP * slots / pool.bytes)}/{_STEP} of {pool.experts}, {tokens} a pass"


def offstage_in(outline: Outline, serving: Mapping[str, Serving], execution: Offstage) -> dict[str, DeviceId]:
    """Return the modules whose experts are brought one by one, and where they compute; ``execution`` is of all."""
    served = (module for module, spec in outline.experts.items() if serving.get(spec.tensors[0]) == "experts")
    return {module: execution[module] for module in served}


def pools(outline: Outline, offstage: Offstage) -> dict[DeviceId, Pool]:
    """Return the pool of each device that computes experts of ``offstage``."""
    sharing: dict[DeviceId, Counter[ExpertKind]] = defaultdict(Counter)
    for module, device in offstage.items():
        sharing[device][outline.expert_kinds[module]] += outline.experts[module].count
    return {device: _pool(counts) for device, counts in sharing.items()}


def _pool(counts: Mapping[ExpertKind, int]) -> Pool:
    whole = sum(kind.bytes * count for kind, count in counts.items())
    return Pool(sum(counts.values()), whole, max(-(-whole // count) for count in counts.values()))


def slot_bytes(pool: Pool, room: int | None, *, staged: int) -> int:
    """Return the bytes of the slots of ``pool`` in so much ``room``, of which ``staged`` is for reading ahead.

    As many slots as let one expert be read while another computes come before that.
    """
    roomy = pool.fitting(None if room is None else room - staged)
    return max(roomy, min(ROOMY * pool.unit_bytes, pool.fitting(room)))


def _hit_rates(
    outline: Outline, offstage: Offstage, *, slots: Mapping[DeviceId, int], routing: Routing
) -> dict[str, float]:
    """Return which share of the experts that each module of ``offstage`` wants is expected to be in slots."""
    alike: dict[tuple[DeviceId, ExpertKind], list[ExpertsSpec]] = defaultdict(list)
    for module, device in offstage.items():
        alike[device, outline.expert_kinds[module]].append(outline.experts[module])
    sharing, rates = pools(outline, offstage), dict[str, float]()
    for (device, _), members in alike.items():
        pool, there = sharing[device], slots.get(device, 0)
        rate = routing.measured(pool, there)
        if rate is None:
            experts = sum(each.count for each in members)
            rate = kept_share(
                there * experts // pool.bytes,
                layers=len(members),
                count=max(each.count for each in members),
                used=max(map(routing.distinct, members)),
            )
        rates |= dict.fromkeys((each.module for each in members), rate)
    return rates


def expert_traffic(
    outline: Outline,
    homes: Mapping[str, DeviceId],
    offstage: Offstage,
    *,
    slots: Mapping[DeviceId, int],
    routing: Routing,
    packed: Collection[str] = (),
) -> ExpertTraffic:
    """Return what a pass uses of the experts that lie at ``homes``, of which those of ``offstage`` are brought.

    ``slots`` are the bytes of the pool on each device that computes them. Tensors that are ``packed`` lie so on the
    host.
    """
    at_rest = set(packed)
    found, resident = (defaultdict[DeviceId, float](float) for _ in range(2))
    brought = Brought()
    rates = _hit_rates(outline, offstage, slots=slots, routing=routing)
    for module, experts in outline.experts.items():
        for name in experts.tensors:
            share = routing.distinct(experts) / experts.count
            used = routing.distinct(experts) * outline.sizes[name] / experts.count
            if module not in offstage:
                resident[homes[name]] += used
                continue
            device, missed = offstage[module], 1 - rates[module]
            rests = name in outline.packed and (homes[name] == DISK or name in at_rest)
            rest_bytes = outline.rest_sizes[name] * share if rests else used
            brought.add(homes[name], rest_bytes * missed, unpacked=used * missed if rests else None)
            found[device] += used * rates[module]
    return ExpertTraffic(brought, found, resident)
