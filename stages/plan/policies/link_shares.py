"""Which accelerator computes which layers where all of their links stream: each link has its share.

Layers take turns. An accelerator's link runs ahead while others compute, but no further than its reserve has room,
which is about a layer's: had each accelerator a long stretch of the model, its link would fill that room once a token,
and wait for its turn. So the next layer of each is on its way while those of the others compute. What crosses from one
accelerator to the next are the activations of a few tokens: a thousandth of a layer's weights, or less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from offstage.stages.machine.rates import Rates
from offstage.stages.plan.outline import Layer, Outline
from offstage.stages.units import DeviceId, in_tier_order

_SMALL = 8
"""A layer that is so many times smaller than the mean goes with the one before it: a norm is no turn."""


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


def devices_to_share(rooms: Mapping[DeviceId, int], rates: Rates, *, most: int) -> Iterator[list[DeviceId]]:
    """Yield the accelerators to which layers are to be shared out, beside the first one alone, the most first.

    They are the largest, at ``most`` so many; where links are unlike also those of the fastest, down to the fastest.
    """
    unlike = bool(rates.links)
    largest = sorted(rooms, key=lambda device: -rooms[device])
    fastest = sorted(rooms, key=lambda device: (-rates.link_of(device), -rooms[device]))
    for count in range(min(most, len(rooms)), 0 if unlike else 1, -1):
        orders = [fastest, largest] if unlike and count > 1 else [fastest] if unlike else [largest]
        tried = dict.fromkeys(tuple(in_tier_order(order[:count])) for order in orders)
        yield from (list(devices) for devices in tried if devices != tuple(rooms)[:1])


def wanted_bytes(layers: Sequence[Layer], rooms: Mapping[DeviceId, int], rates: Rates) -> dict[DeviceId, float]:
    """Return the bytes of ``layers`` that each accelerator is to compute, so that each link takes as long for them.

    ``rooms`` are the bytes that each can hold.
    """
    streamed = max(0, sum(layer.bytes for layer in layers) - sum(rooms.values())) / len(rooms)
    swifter = _swifter_links(rooms, rates)
    return {device: max(1, room + streamed * swifter[device]) for device, room in rooms.items()}


def evened_bytes(
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
            kept, lost = sorted((first[one.name], first[other.name]), key=list(first).index)
            first.update({name: kept for name, found in first.items() if found == lost})

    for layer in layers:
        for name in layer.tensors:
            join(layer, outline.layer_of[outline.skeleton.leader(name)])
    for module, borrowers in outline.skeleton.borrowers.items():
        for borrower in borrowers:
            around = {outline.layer_of[name].name: outline.layer_of[name] for name in outline.below(borrower)}
            if len(around) == 1 and outline.direct[module]:
                join(outline.layer_of[outline.direct[module][0]], *around.values())
    return first
