"""What is wrong with the config's ``hardware``: a key that nobody reads would leave the plan to other figures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

from offstage.pipeline.errors import Fault, closest
from offstage.stages.machine.hosts import AUTO
from offstage.stages.machine.rates import DEVICE_RATES, OPTIONAL_RATES, RATES, parse_rate
from offstage.stages.units import parse_size

Check = Callable[[str, Any], Iterator[Fault]]
"""Yields what is wrong with the value at a place of the config; none is asked of a null."""
_LONGEST_NAME = 60


def hardware_faults(hardware: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the keys of ``hardware`` that aren't known, each with its place, and the values that can't be read."""
    yield from _group("hardware", hardware, keys=_HARDWARE)


def _group(place: str, given: Any, *, keys: Mapping[str, Check], rule: str = "", always: str = "") -> Iterator[Fault]:
    """Yield what is wrong with ``given``, a mapping of ``keys``, or what breaks the ``rule`` that it is one.

    One of the keys is looked at ``always``: it must be given.
    """
    if not isinstance(given, Mapping):
        yield Fault(place, f"{given!r} {rule}")
        return
    for key in given:
        if key not in keys:
            yield Fault(f"{place}.{key}", f"unknown key{closest(str(key), keys)}; here may stand {', '.join(keys)}")
    for key, check in keys.items():
        if given.get(key) is not None or key == always:
            yield from check(f"{place}.{key}", given.get(key))


def _parsed(place: str, value: object, *, parse: Callable[[Any], object]) -> Iterator[Fault]:
    try:
        parse(value)
    except ValueError as error:
        yield Fault(place, str(error))


def _devices(place: str, devices: object) -> Iterator[Fault]:
    if not isinstance(devices, list):
        yield Fault(place, f"{devices!r} is no list; give null, or one {{memory: SIZE}} for each accelerator")
        return
    for index, device in enumerate(devices):
        yield from _device(f"{place}[{index}]", device)


def _device(place: str, device: Any) -> Iterator[Fault]:
    yield from _group(place, device, keys=_DEVICE, rule="is no accelerator; give {memory: SIZE}", always="memory")
    rates = device.get("rates") if isinstance(device, Mapping) else None
    own = rates.get("host_to_device") if isinstance(rates, Mapping) else None
    if own is not None and device.get("host_to_device") is not None:
        given = device["host_to_device"]
        said = f"{given!r} is given, and rates.host_to_device too, {own!r}; leave one of them out"
        yield Fault(f"{place}.host_to_device", said)


def _name(place: str, name: object) -> Iterator[Fault]:
    text = str(name) if isinstance(name, str | int) and not isinstance(name, bool) else ""
    if not text.strip() or len(text) > _LONGEST_NAME or not text.isprintable():
        yield Fault(place, f"{name!r} is no name; give one line of at most {_LONGEST_NAME} characters")


def _rates(place: str, rates: object, *, names: Collection[str]) -> Iterator[Fault]:
    if not isinstance(rates, Mapping):
        yield Fault(place, f"{rates!r} is no mapping; give {{{next(iter(names))}: 3GB}} and the like, or {{}}")
        return
    for name, rate in rates.items():
        if name in names:
            yield from () if rate is None and name in OPTIONAL_RATES else _RATE(f"{place}.{name}", rate)
        elif name in RATES:
            said = f"give it as hardware.rates.{name}. Its own are {', '.join(names)}"
            yield Fault(f"{place}.{name}", f"it is the machine's, and not one accelerator's; {said}")
        else:
            there = ", ".join(names)
            yield Fault(f"{place}.{name}", f"unknown rate{closest(str(name), names)}; there are {there}")


def _hosts(place: str, hosts: Any) -> Iterator[Fault]:
    """Yield what is wrong with the hosts that a model is divided among, and with what each has of its own."""
    is_count = isinstance(hosts, int) and not isinstance(hosts, bool) and hosts > 1
    if hosts != AUTO and not is_count and not (isinstance(hosts, list) and len(hosts) > 1):
        yield Fault(
            place,
            f"{hosts!r} names no hosts; give null for one, {AUTO} for those that torchrun started, how many alike ones "
            "there are, from 2 up, or a list of {devices, host, rates, max_memory}",
        )
    for index, own in enumerate(hosts if isinstance(hosts, list) else ()):
        yield from _group(f"{place}[{index}]", own, keys=_HOST, rule=f"is no host; a host has {', '.join(_HOST)}")


def _latency(place: str, latency: object) -> Iterator[Fault]:
    if isinstance(latency, bool) or not isinstance(latency, int | float) or latency < 0:
        yield Fault(place, f"{latency!r} is no number of seconds; give one from 0 up")


def _exact_hosts(place: str, exact: object) -> Iterator[Fault]:
    if not isinstance(exact or False, bool):
        yield Fault(place, f"{exact!r} is neither; give true to have hosts with unlike kernels refused, or false")


_SIZE, _RATE = partial(_parsed, parse=parse_size), partial(_parsed, parse=parse_rate)
_DEVICE: Mapping[str, Check] = {
    "memory": _SIZE, "name": _name, "host_to_device": _RATE, "rates": partial(_rates, names=DEVICE_RATES),
    "ledger": _SIZE,
}  # fmt: skip
_MEMORY = partial(
    _group, keys={"memory": _SIZE}, rule="is no host; give {memory: SIZE}, or null for this machine's", always="memory"
)
_MACHINE: Mapping[str, Check] = {"devices": _devices, "host": _MEMORY, "rates": partial(_rates, names=RATES)}
_HOST: Mapping[str, Check] = {**_MACHINE, "max_memory": lambda *_: iter(())}
_NETWORK = partial(
    _group, keys={"rate": _RATE, "latency": _latency},
    rule="is no mapping; give {rate: 1.2GB, latency: 0.0002}, or null",
)  # fmt: skip
_HARDWARE: Mapping[str, Check] = {**_MACHINE, "hosts": _hosts, "exact_hosts": _exact_hosts, "network": _NETWORK}
