"""The slots of a mixture: how many experts a device can keep that lie elsewhere, and what tokens then bring.

Each device that computes such experts has one pool of memory, cut into slots for one expert. Experts of one kind, whose
tensors are of the same shapes, can lie in each other's slots; where a mixture has several kinds, each has that part of
the pool which it is of all of the experts. What a token brings is an expectation. Routing is taken as uniform, which is
the worst case for any rule of eviction: an expert is then in a slot as often as any other of its layer, once slots are
full. How skewed it really is shows in a run, and changes with what is asked.

A layer that is called has slots for all experts that it is called for, so that some can come while others compute.
Where those of each layer are as many, each has a bank of its own, and keeps what it holds. Where there are fewer,
layers share one: the one that runs pushes out what the one before it brought, which will be wanted last, and what the
bank holds beyond one call is kept for the others.

Slots are empty at first. What the prompts and the first tokens are routed to fills them, and until then more is brought
than ever after. Prompts that use more experts than a bank holds leave none there that is whole: these pass through it
tensor by tensor.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from offstage.stages.empty_init.skeleton import ExpertsSpec
from offstage.stages.plan.outline import ExpertKind, Outline
from offstage.stages.units import DeviceId

ROOMY, LEAST = 2, 1
"""The slots of each kind that one is read into while the other computes, and those that suffice."""

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

    def share(self, routed: tuple[int, int] | None) -> float:
        """Return which share of a tensor that is ``routed`` the tokens of a pass use; all where that is null.

        Of so many experts one uses so many.
        """
        return wanted(*routed, self.tokens) / routed[0] if routed else 1.0

    def before(self, experts: ExpertsSpec) -> float:
        """Return how many different experts the prompts are expected to use."""
        return wanted(experts.count, experts.per_token, self.prompt_tokens)


SINGLE = Routing()
"""One token a pass."""


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


def wanted(count: int, per_token: int, tokens: int) -> float:
    """Return how many of ``count`` experts so many ``tokens`` of one pass are expected to use, routed uniformly."""
    return count * (1 - (1 - per_token / count) ** tokens)


def bank_bounds(slots: int, *, layers: int, largest: int, together: int) -> list[tuple[int, int]]:
    """Return where the banks of ``slots`` begin and end; the layers are dealt to them in turn.

    ``largest`` is the most that a layer has, ``together`` the experts that one call is expected to use: a bank holds
    these twice over, so that some can come while others compute, and as many banks as ``layers`` are enough. Where all
    have a slot, each layer has those of its own.
    """
    slots = min(slots, layers * largest)
    whole = slots == layers * largest
    banks = layers if whole else max(1, min(layers, slots // max(1, 2 * together)))
    edges = [slots * number // banks for number in range(banks + 1)]
    return list(pairwise(edges))


def kept_share(slots: int, *, layers: int, count: int, used: float, before: float = math.inf, passes: int = 0) -> float:
    """Return which share of its ``count`` experts each of ``layers`` finds in ``slots`` as it is called, on average.

    A call is expected to use so many: ``used``. Routing is uniform, so a wanted expert is one of those as often as any.
    The mean is that over so many ``passes``, ``before`` which so many of a layer's experts were used; 0: of slots that
    are full.
    """
    bounds = bank_bounds(slots, layers=layers, largest=count, together=round(used))
    members = Counter(layer % len(bounds) for layer in range(layers))
    kept = 0.0
    for number, (begin, end) in enumerate(bounds):
        most = min(count, _kept_each(end - begin, members[number], used))
        left = before if before <= end - begin else 0.0
        kept += members[number] * _while_filling(most, count=count, used=used, before=left, passes=passes)
    return kept / (layers * count)


def _while_filling(most: float, *, count: int, used: float, before: float, passes: int) -> float:
    """Return how many of ``count`` experts are in slots as a layer is called, on average over ``passes``.

    At first those that were left ``before`` are, and each pass adds those that it had to bring, up to ``most``.
    """
    in_slots, total = min(most, before), 0.0
    for passed in range(passes):
        if in_slots >= most:
            return (total + most * (passes - passed)) / passes
        total += in_slots
        in_slots = min(most, in_slots + used * (1 - in_slots / count))
    return total / passes if passes else most


def _kept_each(size: int, layers: int, used: float) -> float:
    """Return how many experts each of ``layers`` has in a bank of ``size`` slots as it is called, and uses ``used``."""
    if size >= layers * used:
        return size / layers
    return max(0.0, size - used) / (layers - 1) if layers > 1 else 0.0
