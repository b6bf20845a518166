"""A model divided among hosts: which blocks each computes, so that a token is predicted to be the soonest.

One host after another works on a token, so its seconds are the sum of theirs, and of what is sent between them. What is
around the blocks, choosing the token too, is in the seconds of each, and all of them do it at once. With several
prompts in lockstep each host works on one while others work on the rest, and a token takes what the slowest host takes,
or the share of that sum that is left where too few are under way to fill all hosts.

A plan for several hosts is a list of ordinary ones, each for what a host computes, in that host's budgets: the search
knows a division by what these plans predict. It begins with blocks in proportion to what hosts have room for, and moves
cuts, one or several side by side, as long as that is sooner, by ever smaller steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise, product
from typing import Any

from offstage.pipeline.decoding import decode
from offstage.pipeline.errors import BudgetError, ConfigError, Fault
from offstage.pipeline.peers import peers
from offstage.stages.empty_init.skeleton import Skeleton, TensorSpec, upward
from offstage.stages.hosts.partition import Chain, Partition, partition_of
from offstage.stages.machine.hardware import Hardware
from offstage.stages.machine.hosts import KEY, Network, host_count
from offstage.stages.machine.kernels import Kernels
from offstage.stages.machine.rates import Rates
from offstage.stages.plan.plan import HostPlan, Plan
from offstage.stages.plan.request.choose import ALIKE
from offstage.stages.plan.request.requests import lockstep_is_chosen, read_request

_WORTH_MOVING = 0.999
"""What of a token's seconds must be left for blocks to move: hosts that are alike have as many, but for a reason."""

_EVENNESS = 0.01

HANDING_SECONDS = 1e-3
"""What a message takes beside the network: on both of its hosts threads wake each other until it is computed with.
Nominal."""

PlanOf = Callable[[int, Partition], Plan]
"""Returns the plan of a host for what it computes by a partition; raises ``BudgetError`` where it has no room."""


@dataclass(frozen=True, slots=True)
class PlannedHost:
    """What planning goes by of one host: its ``machine`` and figures, and the budgets that it was given.

    ``capabilities`` are what its last bits hang on, where it is there.
    """

    machine: Hardware
    rates: Rates
    kernels: Kernels
    max_memory: Mapping[str, str] | None
    capabilities: Mapping[str, str] = field(default_factory=dict)

    @property
    def room(self) -> int:
        """The bytes that it has for weights in memory, about."""
        return self.machine.host.available_bytes + sum(one.free_bytes for one in self.machine.accelerators)


@dataclass(frozen=True, slots=True)
class Division:
    """How a model is divided: the ``partition``, what each host has of it, the ``seconds`` of a token with all sends,
    and how many forwards more a pass of decoding may make for free on all of them.

    ``lockstep`` is how many batches are under way together where that was to be chosen, else null.
    """

    partition: Partition
    hosts: tuple[HostPlan, ...]
    seconds: float
    forwards_for_free: float
    lockstep: int | None = None


def agreed(hosts: Callable[[], Sequence[PlannedHost]] | PlannedHost, search: Callable[..., Division]) -> Division:
    """Return the division that ``search`` finds for the hosts: on those that run it the first one does, for all.

    ``hosts`` are what is planned for, or what this one is where all are there.
    """
    if not isinstance(hosts, PlannedHost):
        return search(hosts())
    here = peers()
    described = here.exchange(asdict(hosts))
    division = search([decode(PlannedHost, one) for one in described]) if here.rank == 0 else None
    return decode(Division, here.exchange(None if division is None else asdict(division))[0])


def soonest_together(config: Mapping[str, Any], divided: Callable[[Mapping[str, Any]], Division]) -> Division:
    """Return the division under ``config`` that ``divided`` finds; where it is open how many batches go together, the
    one with the fewest beyond which none is sooner.

    That are two for each host at least, if there are so many: the next one's input is under way while one is computed.
    """
    if not lockstep_is_chosen(config):
        return divided(config)
    most, hosts = read_request(config).members, host_count(config.get("hardware") or {})
    best: Division | None = None
    size = min(most, 2 * hosts)
    while size <= most:
        try:
            division = replace(divided(in_lockstep(config, size)), lockstep=size)
        except BudgetError:
            break
        if best is not None and not division.seconds * ALIKE < best.seconds:
            break
        best, size = division, 2 * size
    for fewer in (min(most, hosts), 1) if best is None else ():
        with suppress(BudgetError):
            return replace(divided(in_lockstep(config, fewer)), lockstep=fewer)
    return best or divided(in_lockstep(config, 1))


def in_lockstep(config: Mapping[str, Any], size: int | None) -> dict[str, Any]:
    """Return ``config`` for ``size`` batches in lockstep; as it is where that is null."""
    generate = config.get("generate")
    if size is None or not isinstance(generate, Mapping):
        return dict(config)
    return {**config, "generate": {**generate, "lockstep": size}}


def divide(
    skeleton: Skeleton, chain: Chain, plan_of: PlanOf, hosts: Sequence[PlannedHost], network: Network, *,
    members: int = 1,
) -> Division:  # fmt: skip
    """Return how the model of ``skeleton`` is divided among ``hosts``, as it is cut along ``chain``, for so many
    ``members`` in lockstep.

    Raises ``ConfigError`` where there are fewer blocks than hosts, ``BudgetError``, with the host's number, where no
    division found has room on each.
    """
    if chain.length < len(hosts):
        raise ConfigError(f"{KEY}: {len(hosts)} hosts for {chain.length} blocks; take {chain.length} at most")
    kinds = [json.dumps(asdict(host), sort_keys=True) for host in hosts]
    around = around_seconds(hosts)
    search = _DivisionSearch(skeleton, chain, plan_of, kinds, members=members, around=around)
    cuts = search.best(_proportional(_sizes(skeleton, chain), [host.room for host in hosts]))
    partition = partition_of(chain, cuts)
    plans = [search.plan(host, partition) for host in range(partition.hosts)]
    sent, busy = _network_seconds(skeleton, chain, partition.hosts, network)
    return Division(
        partition,
        tuple(_host_plan(partition, host, plan, hosts[host].capabilities) for host, plan in enumerate(plans)),
        max(busy, _token_seconds(plans, members, around=around, sent=sent)),
        min(float(plan.forecast.get("forwards_for_free", 0)) for plan in plans),
    )


def _host_plan(partition: Partition, host: int, plan: Plan, capabilities: Mapping[str, str]) -> HostPlan:
    return HostPlan(
        blocks=partition.describe(host),
        weights={device: one.weights for device, one in plan.devices.items() if one.weights},
        device_map=plan.device_map,
        budgets={device: one.budget for device, one in plan.devices.items() if one.is_used},
        predicted={device: one.own_parts for device, one in plan.devices.items() if one.is_used},
        seconds=float(plan.forecast["seconds_per_token"]),
        streamed_bytes=int(plan.forecast["streamed_bytes_per_token"]),
        capabilities=capabilities,
    )


def around_seconds(hosts: Sequence[PlannedHost]) -> float:
    """Return how long what is around the blocks takes the slowest of ``hosts``, of its own seconds.

    With an accelerator it is counted among its calls.
    """
    return max(0.0 if host.machine.accelerators else 1 / host.rates.loops for host in hosts)


def _token_seconds(plans: Sequence[Plan], members: int, *, around: float, sent: float = 0.0) -> float:
    """Return the seconds of a token on all hosts, of which each has its plan, with so many ``members`` in lockstep.

    What is ``around`` the blocks takes each host so long, of its own seconds; one token waits for it once, since all do
    it at once. The groups that they are divided in go from host to host, as many as there are hosts where some share
    weights that stream; what is ``sent`` takes a group a while, and others compute meanwhile.
    """
    each = [float(plan.forecast["seconds_per_token"]) for plan in plans]
    shares = any(plan.forecast["streamed_bytes_per_token"] for plan in plans)
    groups = min(members, len(plans)) if shares else members
    return max(max(each) if members > 1 else 0.0, (sum(each) - (len(each) - 1) * around + sent) / groups)


def _network_seconds(skeleton: Skeleton, chain: Chain, hosts: int, network: Network) -> tuple[float, float]:
    """Return how long what is sent for a token is under way, and how long the busiest link has it.

    That is a hidden state at each border, and the last host's output, to all.
    """
    head = [spec for spec in skeleton.by_module.get(chain.head or "", ()) if len(spec.shape) == 2]
    words, hidden = head[0].shape if head else (0, 0)
    wide = head[0].bytes // max(1, words * hidden) if head else 0
    busy = max(hidden, (hosts - 1) * words) * wide / network.rate
    message = network.latency + HANDING_SECONDS
    return (hosts - 1) * (2 * message + (hidden + words) * wide / network.rate), busy


def _sizes(skeleton: Skeleton, chain: Chain) -> list[int]:
    """Return the bytes of each block, as it rests."""
    index = {name: place for place, name in enumerate(_blocks(chain))}
    sizes = [0] * len(index)
    for spec in skeleton.unique:
        place = next((index[above] for above in upward(spec.name) if above in index), None)
        if place is not None:
            sizes[place] += spec.packed.bytes if spec.packed else spec.bytes
    return sizes


def _blocks(chain: Chain) -> list[str]:
    return [name for blocks in chain.stacks.values() for name in blocks]


def _proportional(sizes: Sequence[int], room: Sequence[int]) -> tuple[int, ...]:
    """Return the cuts by which each host has blocks in proportion to its room, and one at least."""
    whole, sums = sum(room) or len(room), [0, *accumulate(sizes)]
    wanted = [share * sums[-1] / whole for share in accumulate(one or 1 for one in room)]
    cuts = [0]
    for host, share in enumerate(wanted[:-1]):
        _, nearest = min((abs(total - share), place) for place, total in enumerate(sums))
        cuts.append(min(max(nearest, cuts[-1] + 1), len(sizes) - (len(room) - 1 - host)))
    return (*cuts, len(sizes))


class _DivisionSearch:
    """Plans of hosts for runs of blocks, each made once: hosts and runs that are alike have one."""

    def __init__(
        self, skeleton: Skeleton, chain: Chain, plan_of: PlanOf, kinds: Sequence[str], *, members: int, around: float
    ) -> None:
        self._chain, self._plan_of, self._kinds, self._members, self._around = chain, plan_of, kinds, members, around
        self._looks = _looks(skeleton, chain)
        self._known: dict[object, Plan | BudgetError] = {}

    def plan(self, host: int, partition: Partition) -> Plan:
        """Return the plan of ``host`` itself, not of one that is alike."""
        try:
            return self._plan_of(host, partition)
        except BudgetError as error:
            raise BudgetError(f"host {host} ({partition.describe(host)}): {error}") from error

    def best(self, cuts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the cuts that are the soonest of those met on the way from ``cuts``."""
        best, step = (*self._cost(cuts), cuts), 1 << max(0, (cuts[-1] // 4).bit_length() - 1)
        while step:
            moved = min(((*self._cost(other), other) for other in _moved(best[2], step)), default=best)
            is_better = (moved[0], moved[1]) < (best[0], best[1] * _WORTH_MOVING)
            best, step = (moved, step) if is_better else (best, step // 2)
        return best[2]

    def _cost(self, cuts: tuple[int, ...]) -> tuple[int, float]:
        """Return how many hosts have no room for theirs, and the seconds of a token on those that have.

        Where only the slowest counts, a little is added for the others: cuts then move on that change it no more.
        """
        partition, short, plans = partition_of(self._chain, cuts), 0, list[Plan]()
        for host, (begin, end) in enumerate(pairwise(cuts)):
            key = (self._kinds[host], self._looks[begin:end], end == cuts[-1])
            if key not in self._known:
                try:
                    self._known[key] = self._plan_of(host, partition)
                except BudgetError as error:
                    self._known[key] = error
            outcome = self._known[key]
            if isinstance(outcome, BudgetError):
                short += 1
            else:
                plans.append(outcome)
        each = [float(plan.forecast["seconds_per_token"]) for plan in plans]
        even = _EVENNESS * math.hypot(*each) if self._members > 1 else 0.0
        return short, even + (_token_seconds(plans, self._members, around=self._around) if plans else 0.0)


def _moved(cuts: tuple[int, ...], step: int) -> Iterator[tuple[int, ...]]:
    """Yield the cuts with one of them, or several side by side, moved by some ``step``: each host keeps a block."""
    inner = range(1, len(cuts) - 1)
    runs = ((first, last) for first in inner for last in inner if first <= last)
    for (first, last), by in product(runs, (step, -step, 2 * step, -2 * step, 3 * step, -3 * step)):
        moved = tuple(cut + by if first <= place <= last else cut for place, cut in enumerate(cuts))
        if all(begin < end for begin, end in pairwise(moved)):
            yield moved


def _looks(skeleton: Skeleton, chain: Chain) -> tuple[int, ...]:
    """Return a number for each block of the chain: the same for those whose tensors and caches are alike."""
    blocks = _blocks(chain)
    index = {name: place for place, name in enumerate(blocks)}
    inside: list[list[TensorSpec]] = [[] for _ in blocks]
    for spec in skeleton.tensors:
        above = next((above for above in upward(spec.name) if above in index), None)
        if above is not None:
            inside[index[above]].append(replace(spec, name=spec.name[len(above) :]))
    cache_of = {name: replace(cache, blocks=()) for cache in skeleton.caches for name in cache.blocks}
    numbers: dict[object, int] = {}
    looks = ((tuple(specs), cache_of.get(name)) for name, specs in zip(blocks, inside, strict=True))
    return tuple(numbers.setdefault(look, len(numbers)) for look in looks)


def with_division(plan: Plan, division: Division, host: int) -> Plan:
    """Return ``plan``, of ``host``, with how the model is divided, and what a token takes on all hosts together."""
    forecast: Mapping[str, float | int | str] = {
        **plan.forecast,
        "seconds_per_token": division.seconds,
        "forwards_for_free": division.forwards_for_free,
    }
    plan = replace(plan, partition=division.partition, host=host, hosts=division.hosts)
    return replace(plan, lockstep=division.lockstep, forecast=forecast)


def served_faults(config: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield what of ``config`` isn't served where a model is divided among hosts."""
    if host_count(config.get("hardware") or {}) < 2:
        return
    stages = config.get("stages") or ()
    if "finetune" in stages:
        yield Fault(KEY, "a model that is divided among hosts isn't trained; leave hosts null, or stages=finetune out")
    generate, score = (config.get(name) or {} for name in ("generate", "score"))
    for name, node in (("generate", generate), ("score", score)):
        if name in stages and node.get("batch_size") == "auto":
            yield Fault(f"{name}.batch_size", "'auto' is chosen by each host, and all must choose alike; give a number")
    outputs = (config.get("forward") or {}).get("outputs") or ()
    for name in ("hidden_states", "attentions") if "forward" in stages else ():
        if name in outputs:
            yield Fault("forward.outputs", f"{name!r} lies on several hosts, and isn't gathered; leave it out")
    if ((config.get("measure") or {}).get("repeats") or 1) != 1:
        yield Fault("measure.repeats", "hosts that run together measure once; leave it at 1")
