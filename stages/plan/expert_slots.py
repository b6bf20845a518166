"""The slots of a mixture: how many experts a device can keep that lie elsewhere, and what tokens then bring.

Each device that computes such experts has one pool of equal slots, each as large as the largest expert that comes
there. What a token brings is an expectation. Routing is taken as uniform, which is the worst case for any rule of
eviction: an expert is then in a slot as often as there are slots for all experts of the pool. Where a run has measured
how often, that counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from stages.empty_init.skeleton import ExpertsSpec
from stages.plan.outline import Outline
from stages.units import DeviceId

ROOMY, LEAST = 2, 1
"""The slots that one is read into while the other computes, and those that suffice."""

_STEP = 32
"""Measured rates of hits are kept by the share of experts that have slots, in as many steps."""

Offstage = Mapping[str, DeviceId]
"""Module whose experts lie elsewhere than where they compute → where they compute."""


@dataclass(frozen=True, slots=True)
class Pool:
    """What the slots of one device are for: so many ``experts``, the largest of ``expert_bytes``."""

    experts: int
    expert_bytes: int

    def fitting(self, room: int | None) -> int:
        """Return how many slots fit into ``room`` bytes, at most one for each expert; null is no limit."""
        return self.experts if room is None else min(self.experts, max(0, room) // self.expert_bytes)


@dataclass(frozen=True, slots=True)
class Routing:
    """How many ``tokens`` a pass of decoding has, and how often runs found their experts in slots.

    ``hit_rates`` are by ``rate_key``.
    """

    tokens: int = 1
    hit_rates: Mapping[str, float] = field(default_factory=dict)

    def distinct(self, experts: ExpertsSpec) -> float:
        """Return how many different experts the tokens of a pass are expected to use."""
        missed = (1 - experts.per_token / experts.count) ** self.tokens
        return experts.count * (1 - missed)

    def hit_rate(self, pool: Pool, slots: int) -> float:
        """Return which share of the experts that are wanted is in one of so many ``slots``."""
        measured = self.hit_rates.get(rate_key(slots, pool.experts, self.tokens))
        return slots / pool.experts if measured is None or slots == pool.experts else measured


SINGLE = Routing()
"""One token a pass, of which nothing was measured."""


@dataclass(frozen=True, slots=True)
class ExpertTraffic:
    """The bytes of experts that a pass is expected to bring, by where they wait; and to find where they compute.

    What lies there anyway, and not in a slot, is ``resident``.
    """

    brought: Mapping[DeviceId, float]
    found: Mapping[DeviceId, float]
    resident: Mapping[DeviceId, float]

    @property
    def hit_rate(self) -> float:
        """The share of what isn't resident that is in slots."""
        found, brought = sum(self.found.values()), sum(self.brought.values())
        return found / (found + brought) if found + brought else 0.0


def rate_key(slots: int, experts: int, tokens: int) -> str:
    """Return what a rate of hits is kept by: the share of ``experts`` with ``slots``, coarsely, and tokens a pass."""
    return f"{round(_STEP * slots / experts)}/{_STEP} of {experts}, {tokens} a pass"


def pools(outline: Outline, offstage: Offstage) -> dict[DeviceId, Pool]:
    """Return the pool of each device that computes experts of ``offstage``."""
    found: dict[DeviceId, Pool] = {}
    for module, device in offstage.items():
        before = found.get(device, Pool(0, 0))
        largest = max(before.expert_bytes, outline.expert_bytes[module])
        found[device] = Pool(before.experts + outline.experts[module].count, largest)
    return found


def slot_bytes(pool: Pool, room: int | None, *, staged: int) -> int:
    """Return the bytes of the slots of ``pool`` in so much ``room``, of which ``staged`` is for reading ahead.

    As many slots as let one expert be read while another computes come before that.
    """
    roomy = pool.fitting(None if room is None else room - staged)
    return max(roomy, min(ROOMY, pool.fitting(room))) * pool.expert_bytes


def expert_traffic(
    outline: Outline,
    homes: Mapping[str, DeviceId],
    offstage: Offstage,
    *,
    slots: Mapping[DeviceId, int],
    routing: Routing,
) -> ExpertTraffic:
    """Return what a pass uses of the experts that lie at ``homes``, of which those of ``offstage`` are brought.

    ``slots`` are the bytes of the pool on each device that computes them.
    """
    brought, found, resident = (defaultdict[DeviceId, float](float) for _ in range(3))
    sharing = pools(outline, offstage)
    rates = {device: routing.hit_rate(pool, pool.fitting(slots.get(device, 0))) for device, pool in sharing.items()}
    for module, experts in outline.experts.items():
        for name in experts.tensors:
            used = routing.distinct(experts) * outline.sizes[name] / experts.count
            if module not in offstage:
                resident[homes[name]] += used
                continue
            device = offstage[module]
            brought[homes[name]] += used * (1 - rates[device])
            found[device] += used * rates[device]
    return ExpertTraffic(brought, found, resident)
