"""Names of before, each with its name of today: what has them is read for one release more.

A table maps a place, keys with dots between them, to the last of these keys as it is called today. ``*`` stands for
each item of a list, and for each key of a mapping. A metric of each device, ``NAME.DEVICE``, goes by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_LINK = "host_to_device"
_METRICS = {
    "bound": "bottleneck",
    "bound_seconds_per_token": "lower_bound_seconds_per_token",
    "samples": "repeats",
    "busy_samples": "contended_repeats",
    "link_stall_seconds": "transfer_stall_seconds",
    **{f"link_{what}_per_{unit}": f"transfer_{what}_per_{unit}"
       for what in ("bytes", "stall_seconds") for unit in ("token", "forward")},
    "predicted_bound": "predicted_bottleneck",
    "predicted_link_bytes_per_token": "predicted_transfer_bytes_per_token",
    "predicted_packed_bytes_per_token": "predicted_quantised_bytes_per_token",
    "predicted_unpacked_bytes_per_token": "predicted_dequantised_bytes_per_token",
    "predicted_device_unpacked_bytes_per_token": "predicted_device_dequantised_bytes_per_token",
}  # fmt: skip
_BOTTLENECKS = {
    "link": "host-to-device",
    "link beside the host": "host-to-device beside the host",
    "unpacking": "dequantising",
    "unpacking experts": "dequantising experts",
}
_MACHINES = ("hardware", "hardware.hosts.*")
CONFIG_KEYS: Mapping[str, str] = MappingProxyType({
    "objective.figure": "metric",
    **{f"objective.{side}.{old}": new for side in ("at_most", "at_least") for old, new in _METRICS.items()},
    **{f"{machine}.rates.link": _LINK for machine in _MACHINES},
    **{f"{machine}.rates.unpacking": "dequantising" for machine in _MACHINES},
    **{f"{machine}.devices.*.{place}link": _LINK for machine in _MACHINES for place in ("", "rates.")},
})  # fmt: skip
"""Keys of the config."""
CONFIG_VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType({"objective.metric": _METRICS})
"""Words that are values, by the key of today that has them."""
_HAVE_METRICS = ("metrics", "repeats.*.metrics", "hosts.*.metrics")
RECORD_KEYS: Mapping[str, str] = MappingProxyType({
    "samples": "repeats",
    "repeats.*.processor.busy": "contended",
    **{f"{place}.{old}": new for place in (*_HAVE_METRICS, "metric_table") for old, new in _METRICS.items()},
    **{f"config.{old}": new for old, new in CONFIG_KEYS.items()},
})  # fmt: skip
"""Keys of ``run.json``; those of a key that is another now stand at that one's place."""
RECORD_VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType({
    **{f"{place}.{name}": _BOTTLENECKS
       for place in _HAVE_METRICS for name in ("bottleneck", "predicted_bottleneck")},
    "metric_table.*.of": _METRICS,
    "metric_table.*.kind": {"bound": "lower_bound"},
    **{f"config.{place}": words for place, words in CONFIG_VALUES.items()},
})  # fmt: skip
REMOVED: Mapping[str, str] = MappingProxyType({"expert_eviction": "the expert cache evicts by one rule, lfru"})
"""Keys of the config that there were, and what became of each."""

_Rules = list[tuple[list[str], Any]]


def renamed(
    data: Mapping[str, Any], keys: Mapping[str, str], values: Mapping[str, Mapping[str, str]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return ``data`` with the names of today, and the places that had others: each with its place of today.

    Raises ``ValueError``, which names the place, where something is there by both names.
    """
    every: Mapping[str, Any] = {**keys, **values}
    rules = [(place.split("."), change) for place, change in every.items()]
    places: dict[str, str] = {}
    made: dict[str, Any] = _renamed(data, rules, "", places)
    return made, places


def _renamed(node: Any, rules: _Rules, above: str, places: dict[str, str]) -> Any:
    """Return ``node``, which stands below the place ``above``, by ``rules`` whose places begin there."""
    if isinstance(node, list) and rules:
        return [_renamed(item, _below(rules), f"{above}{number}.", places) for number, item in enumerate(node)]
    if not isinstance(node, Mapping) or not rules:
        return node
    here = {place[0]: change for place, change in rules if len(place) == 1}
    names = {old: new for old, new in here.items() if isinstance(new, str)}
    made: dict[Any, Any] = {}
    for key, value in node.items():
        name = _today(key, names)
        if name != key:
            places[f"{above}{key}"] = f"{above}{name}"
            if node.get(name) is not None:
                raise ValueError(f"{above}{key}: it is {above}{name} now, which is there too; leave {above}{key} out")
        elif key in made:  # which has what it had by its name of before
            continue
        is_word = name in here and name not in names
        below = _below(rules, name)
        made[name] = _today(value, here[name]) if is_word else _renamed(value, below, f"{above}{name}.", places)
    return made


def _below(rules: _Rules, name: object = "*") -> _Rules:
    """Return those of ``rules`` that go on below the key ``name``, or an item, from there."""
    return [(place[1:], change) for place, change in rules if len(place) > 1 and place[0] in (name, "*")]


def _today(word: Any, names: Mapping[str, str]) -> Any:
    """Return what ``word`` is called today; of a metric of a device what stands before it is."""
    if not isinstance(word, str):
        return word
    if word in names:
        return names[word]
    before, dot, device = word.partition(".")
    return f"{names.get(before, before)}{dot}{device}"
