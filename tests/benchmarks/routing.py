"""Which experts the tokens of a text are routed to, pass by pass: traces drawn by chance, and what a slot hits in them.

A replay does what keeping experts does in a run, without weights: in each layer of a pass the experts that are kept are
used, the others are brought, each into a free slot or into one whose expert an eviction gives up. The layer's own
experts are busy until it has run; what finds no slot is brought and not kept.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import groupby

from offstage.stages.dispatch.experts.eviction import Expert
from offstage.stages.plan.expert_slots import bank_bounds
from tests.benchmarks.eviction_rules import Rule


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward: the experts that its tokens are routed to, each once, layer by layer; and how many tokens it has."""

    experts: tuple[Expert, ...]
    tokens: int = 1

    def by_layer(self) -> Iterator[list[Expert]]:
        """Yield the experts of each layer in turn."""
        return (list(experts) for _, experts in groupby(self.experts, key=lambda expert: expert[0]))


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """The passes of some texts through a mixture of ``layers`` layers with ``experts`` experts each."""

    name: str
    layers: int
    experts: int
    passes: tuple[Pass, ...]

    @property
    def chosen(self) -> int:
        """How many experts of a layer one token uses."""
        return max(len(experts) for one in self.passes if one.tokens == 1 for experts in one.by_layer())


@dataclass(frozen=True, slots=True)
class Shape:
    """A mixture of ``layers`` layers, of whose ``experts`` experts a token uses ``chosen``; and how many ``tokens``."""

    layers: int
    experts: int
    chosen: int
    tokens: int


def uniform(shape: Shape, seed: int = 0) -> RoutingTrace:
    """Return a trace of which no past tells the future: every token draws its experts anew, all alike."""
    dice = random.Random(seed)
    passes = [
        [(layer, expert) for layer in range(shape.layers) for expert in dice.sample(range(shape.experts), shape.chosen)]
        for _ in range(shape.tokens)
    ]
    return RoutingTrace("uniform", shape.layers, shape.experts, tuple(Pass(tuple(experts)) for experts in passes))


def skewed(shape: Shape, seed: int = 0, *, exponent: float = 0.7, persistence: float = 0.2) -> RoutingTrace:
    """Return a trace where a layer's experts are drawn by Zipf's law, their ranks its own, and some stay.

    The expert of rank r is drawn r**-``exponent`` as often as the first. Each expert of the token before stays with
    probability ``persistence``.
    """
    dice = random.Random(seed)
    weights = [(rank + 1) ** -exponent for rank in range(shape.experts)]
    ranked = [dice.sample(range(shape.experts), shape.experts) for _ in range(shape.layers)]
    last: list[list[int]] = [[] for _ in range(shape.layers)]
    passes = []
    for _ in range(shape.tokens):
        for layer, names in enumerate(ranked):
            chosen = {expert for expert in last[layer] if dice.random() < persistence}
            while len(chosen) < shape.chosen:
                chosen |= set(dice.choices(names, weights, k=1))
            last[layer] = sorted(chosen)
        passes.append(Pass(tuple((layer, expert) for layer, experts in enumerate(last) for expert in experts)))
    return RoutingTrace("skewed", shape.layers, shape.experts, tuple(passes))


class Clairvoyant:
    """Belady's rule, which knows the trace: gives up the expert whose next use is last."""

    def __init__(self, trace: RoutingTrace) -> None:
        self._uses: dict[Expert, list[int]] = defaultdict(list)
        for number in reversed(range(len(trace.passes))):
            for expert in trace.passes[number].experts:
                self._uses[expert].append(number)
        self._never = len(trace.passes)
        self._next: dict[Expert, int] = {}
        self._heap: list[tuple[int, int, Expert]] = []

    def begin_pass(self) -> None:
        """The trace says where passes begin."""

    def begin_layer(self, layer: int) -> None:
        """And where layers do."""

    def use(self, expert: Expert) -> None:
        """Look up the next use of ``expert``."""
        self._uses[expert].pop()
        self._next[expert] = self._uses[expert][-1] if self._uses[expert] else self._never
        heappush(self._heap, self._entry(expert))

    def forget(self, expert: Expert) -> None:
        """Keep ``expert`` no longer."""
        self._next.pop(expert, None)

    def victim(self, busy: Container[Expert]) -> Expert | None:
        """Return the expert whose next use is last."""
        passed_over = []
        victim = None
        while self._heap and victim is None:
            entry = heappop(self._heap)
            expert = entry[-1]
            if expert in self._next and entry == self._entry(expert):
                passed_over.append(entry)
                victim = None if expert in busy else expert
        for entry in passed_over:
            heappush(self._heap, entry)
        return victim

    def _entry(self, expert: Expert) -> tuple[int, int, Expert]:
        return (-self._next[expert], -expert[0], expert)


class Slots:
    """Room for ``count`` experts, given away by ``eviction``."""

    def __init__(self, count: int, eviction: Rule) -> None:
        self._count = count
        self.eviction = eviction
        self._kept: set[Expert] = set()

    @classmethod
    def with_rule(cls, rule: Callable[[], Rule]) -> Callable[[int], Slots]:
        """Return what makes slots, given away by a new eviction each time, of their number."""
        return lambda count: cls(count, rule())

    def run_layer(self, experts: Sequence[Expert]) -> int:
        """Use the ``experts`` of a layer, bring those that aren't kept, and return how many were."""
        missing = [expert for expert in experts if expert not in self._kept]
        self.eviction.begin_layer(experts[0][0])
        for expert in experts:
            if expert in self._kept:
                self.eviction.use(expert)
        for expert in missing:
            self._bring(expert, busy=experts)
        return len(experts) - len(missing)

    def _bring(self, expert: Expert, busy: Container[Expert]) -> None:
        """Keep ``expert``, unless there is no slot for it."""
        if len(self._kept) < self._count or self._give_up(busy):
            self._kept.add(expert)
            self.eviction.use(expert)

    def _give_up(self, busy: Container[Expert]) -> bool:
        """Have the eviction free a slot; return whether one is free now."""
        victim = self.eviction.victim(busy)
        if victim is not None:
            self.eviction.forget(victim)
            self._kept.remove(victim)
        return victim is not None


class OptimalSlots(Slots):
    """Slots that nothing hits more often than: none is taken by an expert that is wanted again later than the rest.

    The experts of the layer that runs need no slot here, and afterwards those that are wanted soonest have them.
    """

    def run_layer(self, experts: Sequence[Expert]) -> int:
        """Use the ``experts`` of a layer, keep the best of all, and return how many were kept before."""
        hits = sum(expert in self._kept for expert in experts)
        self._kept.update(experts)
        for expert in experts:
            self.eviction.use(expert)
        while len(self._kept) > self._count:
            self._give_up(())
        return hits


def hit_rate(trace: RoutingTrace, slots: Mapping[int, Slots]) -> float:
    """Return which share of the experts of one-token passes were kept, of the trace's second half.

    ``slots`` has those of each layer; layers may share them. The first half fills them, and passes of a prompt, which
    want nearly all experts, only happen.
    """
    hits = wanted = 0
    for number, one in enumerate(trace.passes):
        for shared in {id(each): each for each in slots.values()}.values():
            shared.eviction.begin_pass()
        counts = one.tokens == 1 and number >= len(trace.passes) // 2
        for experts in one.by_layer():
            hit_count = slots[experts[0][0]].run_layer(experts)
            hits += hit_count * counts
            wanted += len(experts) * counts
    return hits / wanted


def shared_by_all(trace: RoutingTrace, share: float, slots: Callable[[int], Slots]) -> Mapping[int, Slots]:
    """Return slots for a ``share`` of all experts that all layers have together."""
    return dict.fromkeys(range(trace.layers), slots(round(share * trace.layers * trace.experts)))


def split_evenly(trace: RoutingTrace, share: float, slots: Callable[[int], Slots]) -> Mapping[int, Slots]:
    """Return slots for a ``share`` of the experts of each layer."""
    return {layer: slots(round(share * trace.experts)) for layer in range(trace.layers)}


def in_banks(trace: RoutingTrace, share: float, slots: Callable[[int], Slots]) -> Mapping[int, Slots]:
    """Return slots for a ``share`` of all experts in banks as a run has them: split, where they are enough for that."""
    count = round(share * trace.layers * trace.experts)
    bounds = bank_bounds(count, layers=trace.layers, largest=trace.experts, together=trace.chosen)
    banks = [slots(end - begin) for begin, end in bounds]
    return {layer: banks[layer % len(banks)] for layer in range(trace.layers)}
