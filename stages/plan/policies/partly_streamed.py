"""Placements of which a part of every layer stays where it computes, and the rest is streamed.

A no-split layer must compute on one device; its tensors needn't wait on one. So part of each layer stays and the rest
is streamed, which saves twice: the budget is filled to within a tensor, and the reserve shrinks from the largest layer
to the largest streamed part of one. The same part of every layer is streamed, so that storage is never idle while
resident layers compute: a token then takes the longer of reading and computing, and not their sum.

Several accelerators each have their share of the layers, hold parts of those and stream the rest over links of their
own; or one streams, and the others hold whole layers. Layers take turns: a link runs ahead while others compute, but no
further than its reserve has room, which is about a layer's. Had each accelerator a long stretch of the model, its link
would fill that room once a token, and wait for its turn. So the next layer of each is on its way while those of the
others compute; what crosses between them are the activations of a few tokens, a thousandth of a layer's weights.

Where the budget can't hold a layer's worth at all, everything streams, part by part; or the widest weights do, by
blocks of rows. A head of 128k words is the largest part of most models: what holds it whole, or a reserve for it, has
less room for all else, and a product with it can take as much again beside it, where a kernel copies its weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from offstage.stages.machine.rates import Rates
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Layer, Outline
from offstage.stages.plan.placement import Budgets, Placement, budgeted_accelerators
from offstage.stages.plan.policies.chosen_tensors import below, fitting, least_streamed, total_bytes
from offstage.stages.plan.policies.whole_layers import fill
from offstage.stages.plan.reserves import divisible, least_sizes
from offstage.stages.units import CPU, DISK, DeviceId, in_tier_order

_EVENED = 3
"""How often layers are shared out anew to several links, by what each was to bring."""
_SMALL = 8
"""A layer that is so many times smaller than the mean goes with the one before it: a norm is no turn."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The homes of what accelerators hold as ``whole`` layers, and the layers that others hold ``partly``."""

    whole: Mapping[str, DeviceId]
    partly: Mapping[DeviceId, Sequence[Layer]]


@dataclass(frozen=True, slots=True)
class PartlyStreamed:
    """The placements of the model of ``outline`` under ``budgets``, streamed over at most so many ``links``; null: all.

    ``rates`` are those of the links, by which layers are shared out to them.
    """

    outline: Outline
    budgets: Budgets
    rates: Rates
    links: int | None = None

    @property
    def accelerators(self) -> list[DeviceId]:
        """The accelerators with a budget."""
        return budgeted_accelerators(self.budgets)

    @property
    def main(self) -> DeviceId:
        """The device that computes what none holds: the first accelerator with a budget, or the host."""
        return next(iter(self.accelerators), CPU)

    def placements(self) -> Iterator[Placement]:
        """Yield those of partly resident layers: to one accelerator, and to as many as can stream.

        Where links are unlike a slow one may be better left out: then fewer are tried too.
        """
        alone, *spread = self._shares()
        for plain_stays in (False, True) if self.outline.packed else (False,):
            for reads_on in (False, True) if self.main == CPU else (False,):
                yield from self._split(alone, plain_stays=plain_stays, reads_on=reads_on)
            tried = ([*self._evened(shares, plain_stays=plain_stays)] for shares in spread)
            yield from chain.from_iterable(tried) if self.rates.apart else next(filter(None, tried), ())

    def resident(self) -> Iterator[Placement]:
        """Yield that on the host of which nothing is streamed but rows of tables, if the budgets can hold it."""
        yield from (one for one in self._split(self._alone()) if not lay_out(self.outline, one).kept_free())

    def part_by_part(self) -> Iterator[Placement]:
        """Yield those of which all is streamed to one accelerator or several, if they can hold what is in use."""
        for shares in self._shares():
            names = [name for layer in self.outline.layers for name in layer.owned if name not in shares.whole]
            homes = {**shares.whole, **below(self.outline, names, self.main, self.budgets)}
            placement = _sharing(self.outline, Placement(homes, self.main), shares)
            if lay_out(self.outline, placement, self.budgets).shortage(tight=True) is None:
                yield placement

    def by_blocks(self) -> Iterator[Placement]:
        """Yield those on the host of which the widest weights come by blocks of rows, and others partly stay.

        The widest are the widest alone, or those of the two widest sizes, and so on.
        """
        outline, room = self.outline, self.budgets.get(CPU)
        if self.main != CPU or room is None:
            return
        least, alone = least_sizes(outline), self._alone()
        for wide in _wide_sets(outline):
            block = max(least[name] for leader in wide for name in outline.skeleton.names_of(leader))
            beside = replace(self, budgets={**self.budgets, CPU: room - block})
            for placement in beside._split(alone, wide=wide):
                away = {name for name, home in placement.homes.items() if home == DISK} - wide - outline.lookups
                ahead = outline.read_ahead_bytes(away, unpacked=not away.isdisjoint(outline.packed))
                left = lay_out(outline, placement, self.budgets).left(CPU, {CPU: ahead + block}) or 0
                more = fitting(outline, away, left)
                yield replace(placement, homes={**placement.homes, **dict.fromkeys(more, CPU)})

    def _shares(self) -> Iterator[Shares]:
        """Yield how layers can be shared out: partly to the main device alone, or to accelerators that may stream."""
        yield self._alone()
        rooms = {device: room for device in self.accelerators if (room := self.budgets[device]) is not None}
        for streaming in _devices_to_share(rooms, self.rates, most=self.links or len(rooms)):
            homes, rest = self._whole_layers([device for device in rooms if device not in streaming])
            wanted = _wanted_bytes(rest, {device: rooms[device] for device in streaming}, self.rates)
            yield Shares(homes, share_layers(self.outline, rest, wanted))

    def _alone(self) -> Shares:
        homes, rest = self._whole_layers(self.accelerators[1:])
        return Shares(homes, {self.main: rest})

    def _whole_layers(self, devices: Sequence[DeviceId]) -> tuple[dict[str, DeviceId], list[Layer]]:
        """Return the homes of the layers that ``devices`` hold whole, and the layers left."""
        if not devices:
            return {}, list(self.outline.layers)
        homes = fill(self.outline, {**{device: self.budgets[device] for device in devices}, DISK: None})
        in_memory = {name: home for name, home in homes.items() if home != DISK}
        return in_memory, [layer for layer in self.outline.layers if not in_memory.keys() & set(layer.owned)]

    def _evened(self, shares: Shares, *, plain_stays: bool) -> Iterator[Placement]:
        """Yield those of ``shares``, and of such as have the links bring more evenly, if the budgets hold them."""
        for _ in range(_EVENED):
            placements = list(self._split(shares, plain_stays=plain_stays))
            if not placements:
                return
            yield from placements
            brought = {
                device: sum(
                    self.outline.sizes[name]
                    for layer in layers
                    for name in layer.owned
                    if not isinstance(placements[0].homes[name], int)
                )
                for device, layers in shares.partly.items()
            }
            left = {layer.name for layers in shares.partly.values() for layer in layers}
            layers = [layer for layer in self.outline.layers if layer.name in left]
            again = share_layers(self.outline, layers, _evened_bytes(shares.partly, brought, self.rates))
            if again == shares.partly:
                return
            shares = replace(shares, partly=again)

    def _split(
        self, shares: Shares, *, plain_stays: bool = False, reads_on: bool = False, wide: frozenset[str] = frozenset()
    ) -> Iterator[Placement]:
        """Yield placements of partly resident layers, if the budgets can hold any: the fewest bytes streamed first.

        If ``plain_stays``, no more is streamed than what rests packed, which is read in fewer bytes. What is ``wide``
        is streamed in any case, by blocks of rows. If it ``reads_on``, staging memory is as large as that takes.
        """
        alone = len(shares.partly) == 1
        choices = [
            self._streamed_of(layers, device, plain_stays=plain_stays, alone=alone, reads_on=reads_on, wide=wide)
            for device, layers in shares.partly.items()
        ]
        for chosen in zip(*choices, strict=False):
            yield from self._streaming(shares, dict(zip(shares.partly, chosen, strict=True)), tight=bool(wide))

    def _streaming(
        self, shares: Shares, streamed: Mapping[DeviceId, Collection[str]], *, tight: bool
    ) -> Iterator[Placement]:
        """Yield the placement of ``shares`` that has what is ``streamed`` to each device, if the budgets hold it."""
        outline, main = self.outline, self.main
        to_main = [*shares.partly] == [main]
        away = set[str]().union(*streamed.values())
        homes = dict(shares.whole)
        for device, layers in shares.partly.items():
            homes |= {name: device for layer in layers for name in layer.owned if name not in away}
        names = [name for layer in outline.layers for name in layer.owned if name in away]
        homes |= below(outline, names, main, self.budgets)
        devices = set(homes.values())
        first = main if to_main else next((device for device in self.accelerators if device in devices), main)
        placement = _sharing(outline, Placement(homes, first), shares)
        short = lay_out(outline, placement, self.budgets).shortage(tight=tight)
        if short is None and (main in devices or not to_main):
            yield placement

    def _streamed_of(
        self,
        layers: Sequence[Layer],
        device: DeviceId,
        *,
        plain_stays: bool,
        alone: bool,
        reads_on: bool,
        wide: frozenset[str],
    ) -> list[set[str]]:
        """Return which tensors of ``layers`` can be streamed to ``device``, so that others fit into its budget."""
        outline, room = self.outline, self.budgets.get(device, 0)
        if room is None:
            return []
        owned = {name for layer in layers for name in layer.owned}
        tables = owned & outline.tables if device == CPU else set[str]()
        stays = owned - outline.packed.keys() - tables if plain_stays else set[str]()
        if device == CPU:  # what code makes is there anyway
            stays |= outline.computed & owned
        left = room - total_bytes(outline, stays)
        parts = _without(outline, layers, tables | stays | wide)
        found = least_streamed(outline, parts, left, alone=alone, reads_on=reads_on)
        return [self._with_tables(layers, streamed | wide, tables, room) for streamed in found]

    def _with_tables(self, layers: Sequence[Layer], streamed: set[str], tables: set[str], room: int) -> set[str]:
        """Return what is ``streamed``, and those of the ``tables`` that don't fit beside what stays of ``layers``."""
        resident = sum(layer.bytes for layer in layers) - total_bytes(self.outline, streamed | tables)
        return streamed | (tables - fitting(self.outline, tables, 0 if streamed else room - resident))


def _sharing(outline: Outline, placement: Placement, shares: Shares) -> Placement:
    """Return ``placement`` with those layers computing where their share is that have nothing on any accelerator."""
    computes: dict[str, DeviceId] = {}
    for device, layers in shares.partly.items():
        for layer in layers if device != placement.main else ():
            leaders = map(outline.skeleton.leader, layer.owned or layer.tensors)
            if not any(isinstance(placement.homes[leader], int) for leader in leaders):
                computes[layer.name] = device
    return replace(placement, computes=computes)


def _without(outline: Outline, layers: Sequence[Layer], names: set[str]) -> list[Layer]:
    """Return ``layers`` without the tensors ``names``."""
    left = [(layer, tuple(name for name in layer.owned if name not in names)) for layer in layers]
    return [replace(layer, owned=mine, bytes=sum(outline.sizes[name] for name in mine)) for layer, mine in left]


def _wide_sets(outline: Outline) -> Iterator[frozenset[str]]:
    """Yield the leaders of the widest divisible weights, of the two widest sizes, and so on; tied tables count too."""
    divided = divisible(outline)
    users = {
        name: set(outline.skeleton.names_of(name)) - outline.lookups for layer in outline.layers for name in layer.owned
    }
    wide = {leader: outline.sizes[leader] for leader, names in users.items() if names and names <= divided}
    for least in sorted(set(wide.values()), reverse=True):
        yield frozenset(leader for leader, size in wide.items() if size >= least)


def share_layers(
    outline: Outline, layers: Sequence[Layer], wanted: Mapping[DeviceId, float]
) -> dict[DeviceId, list[Layer]]:
    """Return which of ``layers`` each accelerator computes, about as many bytes of them as are ``wanted`` there.

    Layers that share a tensor stay on one.
    """
    total = sum(layer.bytes for layer in layers)
    small, together = total / len(layers) / _SMALL if layers else 0, partners(outline, layers)
    given: Counter[DeviceId] = Counter()
    places: dict[str, DeviceId] = {}
    shares: dict[DeviceId, list[Layer]] = {device: [] for device in wanted}
    device = next(iter(wanted))
    for layer in layers:
        if layer.bytes >= small and together[layer.name] not in places:
            device = min(wanted, key=lambda one: (given[one] + layer.bytes) / wanted[one])
        place = places.setdefault(together[layer.name], device)
        given[place] += layer.bytes
        shares[place].append(layer)
    return shares


def _devices_to_share(rooms: Mapping[DeviceId, int], rates: Rates, *, most: int) -> Iterator[list[DeviceId]]:
    """Yield the accelerators to which layers are to be shared out, beside the first one alone, the most first.

    They are the largest, at ``most`` so many; where links are unlike also those of the fastest, down to the fastest.
    """
    unlike = bool(rates.apart)
    largest = sorted(rooms, key=lambda device: -rooms[device])
    fastest = sorted(rooms, key=lambda device: (-rates.link_of(device), -rooms[device]))
    for count in range(min(most, len(rooms)), 0 if unlike else 1, -1):
        orders = [fastest, largest] if unlike and count > 1 else [fastest] if unlike else [largest]
        tried = dict.fromkeys(tuple(in_tier_order(order[:count])) for order in orders)
        yield from (list(devices) for devices in tried if devices != tuple(rooms)[:1])


def _wanted_bytes(layers: Sequence[Layer], rooms: Mapping[DeviceId, int], rates: Rates) -> dict[DeviceId, float]:
    """Return the bytes of ``layers`` that each accelerator is to compute, so that each link takes as long for them.

    ``rooms`` are the bytes that each can hold.
    """
    streamed = max(0, sum(layer.bytes for layer in layers) - sum(rooms.values())) / len(rooms)
    swifter = _swifter_links(rooms, rates)
    return {device: max(1, room + streamed * swifter[device]) for device, room in rooms.items()}


def _evened_bytes(
    shares: Mapping[DeviceId, Sequence[Layer]], brought: Mapping[DeviceId, int], rates: Rates
) -> dict[DeviceId, float]:
    """Return the bytes that each accelerator is to compute where links that are done first take over from others.

    They are so many bytes of ``brought`` under ``shares``.
    """
    mean, swifter = sum(brought.values()) / len(shares), _swifter_links(shares, rates)
    return {
        device: max(1, sum(layer.bytes for layer in layers) - (brought[device] - mean * swifter[device]))
        for device, layers in shares.items()
    }


def _swifter_links(devices: Collection[DeviceId], rates: Rates) -> dict[DeviceId, float]:
    """Return how many times as much as the mean of ``devices`` the link of each brings."""
    mean = sum(map(rates.link_of, devices)) / len(devices)
    return {device: rates.link_of(device) / mean for device in devices}


def partners(outline: Outline, layers: Sequence[Layer]) -> dict[str, str]:
    """Return the first of those layers that share tensors with each layer, itself among them: ties, and borrowers."""
    first = {layer.name: layer.name for layer in layers}

    def join(one: Layer, other: Layer) -> None:
        if one.name in first and other.name in first and first[one.name] != first[other.name]:
            winner, lost = sorted((first[one.name], first[other.name]), key=list(first).index)
            first.update({name: winner for name, group in first.items() if group == lost})

    for layer in layers:
        for name in layer.tensors:
            join(layer, outline.layer_of[outline.skeleton.leader(name)])
    for module, borrowers in outline.skeleton.borrowers.items():
        for borrower in borrowers:
            around = {outline.layer_of[name].name: outline.layer_of[name] for name in outline.below(borrower)}
            if len(around) == 1 and outline.direct[module]:
                join(outline.layer_of[outline.direct[module][0]], *around.values())
    return first
