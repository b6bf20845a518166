"""The slots of a mixture: how many experts a device can keep that lie elsewhere, and what tokens then bring.

Each device that computes such experts has one pool of memory, cut into slots for one expert. Experts of one kind, whose
tensors are of the same shapes, can lie in each other's slots; where a mixture has several kinds, each has that part of
the pool which it is of all of the experts. What a token brings is an expectation. Routing is taken as uniform, which is
the worst case for any rule of eviction: an expert is then in a slot as often as any other of its layer, once slots are
full. Where a run has measured how often, that counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from offstage.stages.empty_init.skeleton import ExpertsSpec, parent
from offstage.stages.plan.expert_banks import kept_share, wanted
from offstage.stages.plan.outline import ExpertKind, Outline
from offstage.stages.plan.serving import Serving
from offstage.stages.plan.token_time import Brought, HostShare, LayerOutput
from offstage.stages.units import CPU, DISK, DeviceId

ROOMY, LEAST = 2, 1
"""The slots of each kind that one is read into while the other computes, and those that suffice."""

UNIFORM, MEASURED = "uniform", "measured"
"""What a prediction takes the routing of tokens to be, or goes by."""

_STEP = 32
"""Measured rates of hits are kept by the share of experts that have slots, in as many steps."""

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
    """How many ``tokens`` a pass of decoding has, and how often runs found their experts in slots.

    ``hit_rates`` are by ``rate_key``. The prompts before have ``prompt_tokens``, and so many ``passes`` follow; 0: so
    many that it doesn't matter how slots are filled.
    """

    tokens: int = 1
    hit_rates: Mapping[str, float] = field(default_factory=dict)
    prompt_tokens: int = 0
    passes: int = 0

    def distinct(self, experts: ExpertsSpec) -> float:
        """Return how many different experts the tokens of a pass are expected to use."""
        return wanted(experts.count, experts.per_token, self.tokens)

    def share(self, count: int, per_token: int) -> float:
        """Return which share of ``count`` experts the tokens of a pass are expected to use."""
        return wanted(count, per_token, self.tokens) / count

    def measured(self, pool: Pool, slots: int) -> float | None:
        """Return which share of the experts that are wanted runs found in so many bytes of ``slots``, if any did."""
        return self.hit_rates.get(rate_key(pool, slots, self.tokens))

    def before(self, experts: ExpertsSpec) -> float:
        """Return how many different experts the prompts are expected to use."""
        return wanted(experts.count, experts.per_token, self.prompt_tokens)


SINGLE = Routing()
"""One token a pass, of which nothing was measured."""


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


def host_share(
    outline: Outline, computing: Mapping[str, DeviceId], output: LayerOutput, routing: Routing = SINGLE
) -> HostShare:
    """Return what the host computes of a token, where ``computing`` says which device computes each layer.

    For each of its layers the ``output`` of another goes there, and its own comes back.
    """
    there = [layer for layer in outline.layers if computing[layer.name] == CPU]
    names = (name for layer in there for name in layer.tensors)
    return HostShare(read_bytes(outline, names, routing), 2 * len(there), output)


@dataclass(frozen=True, slots=True)
class ExpertTraffic:
    """The bytes of experts that a pass is expected to bring, by where they wait; and to find where they compute.

    What lies there anyway, and not in a slot, is ``resident``. The ``routing`` is ``MEASURED`` where runs say how often
    that is, on each device, else it is taken to be ``UNIFORM``.
    """

    brought: Brought
    found: Mapping[DeviceId, float]
    resident: Mapping[DeviceId, float]
    routing: str

    @property
    def hit_rate(self) -> float:
        """The share of what isn't resident that is in slots."""
        found, brought = sum(self.found.values()), self.brought.used.total()
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
        pool, there = pools[device], slots.get(device, 0)
        rate = routing.measured(pool, there)
        if rate is None:
            experts = sum(each.count for each in members)
            rate = kept_share(
                there * experts // pool.bytes,
                layers=len(members),
                count=max(each.count for each in members),
                used=max(map(routing.distinct, members)),
                before=max(map(routing.before, members)),
                passes=routing.passes,
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
    rates = hit_rates(outline, offstage, pools=pools(outline, offstage), slots=slots, routing=routing)
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
            unpacked = used * missed if rests else None
            moved = outline.moved_bytes(name, device) if rests else None
            moved_there = None if moved is None else moved * share * missed
            brought.add(
                homes[name],
                rest_bytes * missed,
                computes=device,
                unpacked=unpacked,
                moved=moved_there,
                tensors=routing.distinct(experts) * missed,
                ahead=False,
            )
            found[device] += used * rates[module]
    measured = (routing.measured(pool, slots.get(device, 0)) for device, pool in pools(outline, offstage).items())
    return ExpertTraffic(brought, found, resident, UNIFORM if None in measured else MEASURED)


def host_calls(outline: Outline, execution: Mapping[str, DeviceId], routing: Routing) -> float:
    """Return how many calls of modules that hold weights the host computes for a token."""
    shares = {parent(name): routing.share(*experts_of) for name, experts_of in outline.listed.items()}
    return sum(shares.get(name, 1) for name in outline.skeleton.calls if execution.get(name) == CPU)
