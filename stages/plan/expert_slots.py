"""The slots of a mixture: how many experts a device can keep that lie elsewhere, and what tokens then bring.

Each device that computes such experts has one pool of memory, cut into slots for one expert. Experts of one kind, whose
tensors are of the same shapes, can lie in each other's slots; where a mixture has several kinds, each has that part of
the pool which it is of all of the experts. What a token brings is an expectation. Routing is taken as uniform, which is
the worst case for any rule of eviction: an expert is then in a slot as often as any other of its layer, once slots are
full. How skewed it really is shows in a run, and changes with what is asked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from offstage.stages.empty_init.skeleton import ExpertsSpec, parent
from offstage.stages.plan.expert_banks import kept_share, wanted
from offstage.stages.plan.outline import ExpertKind, Outline
from offstage.stages.units import DeviceId

ROOMY, LEAST = 2, 1
"""The slots of each kind that one is read into while the other computes, and those that suffice."""

UNIFORM = "uniform"
"""What a prediction takes the routing of tokens to be."""

Offstage = Mapping[str, DeviceId]
"""Module whose experts lie elsewhere than where they compute → where they compute."""


@dataclass(frozen=True, slots=True)
class Pool:
    """What the slots of one device are for: so many ``experts``, of so many ``bytes`` together.

    With ``unit_bytes`` each kind has a slot at least: where there is one kind they are the bytes of an expert. With so
    many slots of each kind as ``roomy`` says all that a token uses can be brought at once.
    """

    experts: int
    bytes: int
    unit_bytes: int
    roomy: int = ROOMY

    def fitting(self, room: int | None) -> int:
        """Return the bytes of the slots that fit into ``room`` bytes, at most one for each expert; null is no limit."""
        return self.bytes if room is None or room >= self.bytes else max(0, room) // self.unit_bytes * self.unit_bytes

    def count(self, slots: int) -> int:
        """Return how many experts have a place in so many bytes of ``slots``."""
        return slots * self.experts // self.bytes


@dataclass(frozen=True, slots=True)
class Routing:
    """How many ``tokens`` a pass of decoding has, which are routed uniformly.

    The prompts before have ``prompt_tokens``, and so many ``passes`` follow; 0: so many that it doesn't matter how
    slots are filled.
    """

    tokens: int = 1
    prompt_tokens: int = 0
    passes: int = 0

    def distinct(self, experts: ExpertsSpec) -> float:
        """Return how many different experts the tokens of a pass are expected to use."""
        return wanted(experts.count, experts.per_token, self.tokens)

    def share(self, count: int, per_token: int) -> float:
        """Return which share of ``count`` experts the tokens of a pass are expected to use."""
        return wanted(count, per_token, self.tokens) / count

    def before(self, experts: ExpertsSpec) -> float:
        """Return how many different experts the prompts are expected to use."""
        return wanted(experts.count, experts.per_token, self.prompt_tokens)


SINGLE = Routing()
"""One token a pass."""


def read_bytes(outline: Outline, names: Iterable[str], routing: Routing = SINGLE) -> float:
    """Return what a pass reads of the tensors ``names`` where they lie and compute, in bytes.

    Of tables that are looked up it is next to nothing, of experts those that its tokens use.
    """
    total = 0.0
    for name in names:
        if name in outline.expert_tensors:
            experts = outline.experts[parent(name)]
            share = routing.share(experts.count, experts.per_token)
        elif name in outline.listed:
            share = routing.share(*outline.listed[name])
        else:
            share = 0.0 if name in outline.lookups else 1.0
        total += outline.sizes[name] * share
    return total


def pools(outline: Outline, offstage: Offstage) -> dict[DeviceId, Pool]:
    """Return the pool of each device that computes experts of ``offstage``."""
    sharing: dict[DeviceId, Counter[ExpertKind]] = defaultdict(Counter)
    for module, device in offstage.items():
        sharing[device][outline.expert_kinds[module]] += outline.experts[module].count
    return {device: _pool(counts, roomy_slots(outline)) for device, counts in sharing.items()}


def _pool(counts: Mapping[ExpertKind, int], roomy: int) -> Pool:
    whole = sum(kind.bytes * count for kind, count in counts.items())
    return Pool(sum(counts.values()), whole, max(-(-whole // count) for count in counts.values()), roomy)


def roomy_slots(outline: Outline) -> int:
    """Return how many slots of each kind let all experts that a token uses of a layer be brought at once.

    Storage has enough to do then, where two would have it wait for each that computes.
    """
    return max([ROOMY, *(spec.per_token for spec in outline.experts.values())])


def slot_bytes(pool: Pool, room: int | None, *, staged: int) -> int:
    """Return the bytes of the slots of ``pool`` in so much ``room``, of which ``staged`` is for reading ahead.

    As many slots as a token's experts need come before that.
    """
    beside = pool.fitting(None if room is None else room - staged)
    return max(beside, min(pool.roomy * pool.unit_bytes, pool.fitting(room)))


def hit_rates(
    outline: Outline,
    offstage: Offstage,
    *,
    pools: Mapping[DeviceId, Pool],
    slots: Mapping[DeviceId, int],
    routing: Routing,
) -> dict[str, float]:
    """Return which share of the experts that each module of ``offstage`` wants is expected to be in ``slots`` bytes."""
    alike: dict[tuple[DeviceId, ExpertKind], list[ExpertsSpec]] = defaultdict(list)
    for module, device in offstage.items():
        alike[device, outline.expert_kinds[module]].append(outline.experts[module])
    rates = dict[str, float]()
    for (device, _), members in alike.items():
        experts = sum(each.count for each in members)
        rate = kept_share(
            slots.get(device, 0) * experts // pools[device].bytes,
            layers=len(members),
            count=max(each.count for each in members),
            used=max(map(routing.distinct, members)),
            before=max(map(routing.before, members)),
            passes=routing.passes,
        )
        rates |= dict.fromkeys((each.module for each in members), rate)
    return rates
