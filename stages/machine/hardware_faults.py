"""What is wrong with the config's ``hardware``: a key that nobody reads would leave the plan to other figures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from offstage.pipeline.errors import Fault, closest
from offstage.stages.machine.hosts import AUTO, EXACT_KEY, KEY
from offstage.stages.machine.rates import DEVICE_RATES, OPTIONAL_RATES, RATES, parse_rate
from offstage.stages.units import parse_size

_KEYS = ("devices", "host", "rates", "hosts", "exact_hosts", "network")
_DEVICE_KEYS = ("memory", "name", "host_to_device", "rates", "ledger")
_HOST_KEYS = ("memory",)
_ONE_OF_SEVERAL_KEYS = ("devices", "host", "rates", "max_memory")
_NETWORK_KEYS = ("rate", "latency")
_LONGEST_NAME = 60


def hardware_faults(hardware: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the keys of ``hardware`` that aren't known, each with its place, and the values that can't be read."""
    yield from _unknown("hardware", hardware, _KEYS)
    yield from _machine_faults("hardware", hardware)
    yield from _hosts_faults(hardware.get("hosts"))
    yield from _network_faults(hardware.get("network"))
    if not isinstance(exact := hardware.get("exact_hosts") or False, bool):
        yield Fault(EXACT_KEY, f"{exact!r} is neither; give true to have hosts with unlike kernels refused, or false")


def _hosts_faults(hosts: object) -> Iterator[Fault]:
    """Yield what is wrong with the hosts that a model is divided among, and with what each has of its own."""
    is_count = isinstance(hosts, int) and not isinstance(hosts, bool) and hosts > 1
    if hosts not in (None, AUTO) and not is_count and not (isinstance(hosts, list) and len(hosts) > 1):
        yield Fault(
            KEY,
            f"{hosts!r} names no hosts; give null for one, {AUTO} for those that torchrun started, how many alike ones "
            "there are, from 2 up, or a list of {devices, host, rates, max_memory}",
        )
    for index, own in enumerate(hosts if isinstance(hosts, list) else ()):
        place = f"{KEY}[{index}]"
        if isinstance(own, Mapping):
            yield from _unknown(place, own, _ONE_OF_SEVERAL_KEYS)
            yield from _machine_faults(place, own)
        else:
            yield Fault(place, f"{own!r} is no host; a host has {_listed(_ONE_OF_SEVERAL_KEYS)}")


def _network_faults(network: object) -> Iterator[Fault]:
    """Yield what is wrong with what lies between hosts."""
    if network is None:
        return
    if not isinstance(network, Mapping):
        yield Fault("hardware.network", f"{network!r} is no mapping; give {{rate: 1.2GB, latency: 0.0002}}, or null")
        return
    yield from _unknown("hardware.network", network, _NETWORK_KEYS)
    rate, latency = network.get("rate"), network.get("latency")
    if rate is not None:
        yield from _wrong("hardware.network.rate", parse_rate, rate)
    if latency is not None and (isinstance(latency, bool) or not isinstance(latency, int | float) or latency < 0):
        yield Fault("hardware.network.latency", f"{latency!r} is no number of seconds; give one from 0 up")


def _machine_faults(place: str, given: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield what is wrong with what ``place`` says of one machine."""
    yield from _rate_faults(f"{place}.rates", given.get("rates"), RATES)
    host, devices = given.get("host"), given.get("devices")
    if isinstance(host, Mapping):
        yield from _unknown(f"{place}.host", host, _HOST_KEYS)
        yield from _wrong(f"{place}.host.memory", parse_size, host.get("memory"))
    elif host is not None:
        yield Fault(f"{place}.host", f"{host!r} is no host; give {{memory: SIZE}}, or null for this machine's")
    if devices is not None and not isinstance(devices, list):
        yield Fault(
            f"{place}.devices", f"{devices!r} is no list; give null, or one {{memory: SIZE}} for each accelerator"
        )
    for index, device in enumerate(devices if isinstance(devices, list) else ()):
        yield from _device_faults(f"{place}.devices[{index}]", device)


def _device_faults(place: str, device: object) -> Iterator[Fault]:
    if not isinstance(device, Mapping):
        yield Fault(place, f"{device!r} is no accelerator; give {{memory: SIZE}}")
        return
    yield from _unknown(place, device, _DEVICE_KEYS)
    yield from _wrong(f"{place}.memory", parse_size, device.get("memory"))
    if device.get("ledger") is not None:
        yield from _wrong(f"{place}.ledger", parse_size, device["ledger"])
    name, bandwidth, rates = device.get("name"), device.get("host_to_device"), device.get("rates")
    if name is not None and not _is_name(name):
        yield Fault(f"{place}.name", f"{name!r} is no name; give one line of at most {_LONGEST_NAME} characters")
    if bandwidth is not None:
        yield from _wrong(f"{place}.host_to_device", parse_rate, bandwidth)
    yield from _rate_faults(f"{place}.rates", rates, DEVICE_RATES)
    own = rates.get("host_to_device") if isinstance(rates, Mapping) else None
    if bandwidth is not None and own is not None:
        said = f"{bandwidth!r} is given, and rates.host_to_device too, {own!r}; leave one of them out"
        yield Fault(f"{place}.host_to_device", said)


def _rate_faults(place: str, rates: object, names: Collection[str]) -> Iterator[Fault]:
    if rates is None:
        return
    if not isinstance(rates, Mapping):
        yield Fault(place, f"{rates!r} is no mapping; give {{{next(iter(names))}: 3GB}} and the like, or {{}}")
        return
    for name, rate in rates.items():
        if name in names:
            yield from () if rate is None and name in OPTIONAL_RATES else _wrong(f"{place}.{name}", parse_rate, rate)
        elif name in RATES:
            yield Fault(
                f"{place}.{name}",
                f"it is the machine's, and not one accelerator's; give it as hardware.rates.{name}. Its own are "
                f"{_listed(names)}",
            )
        else:
            yield Fault(f"{place}.{name}", f"unknown rate{closest(str(name), names)}; there are {_listed(names)}")


def _unknown(place: str, given: Mapping[Any, Any], names: Collection[str]) -> Iterator[Fault]:
    for key in given:
        if key not in names:
            yield Fault(f"{place}.{key}", f"unknown key{closest(str(key), names)}; here may stand {_listed(names)}")


def _wrong(key: str, parse: Callable[[Any], object], value: object) -> Iterator[Fault]:
    try:
        parse(value)
    except ValueError as error:
        yield Fault(key, str(error))


def _is_name(name: object) -> bool:
    text = str(name) if isinstance(name, str | int) and not isinstance(name, bool) else ""
    return bool(text.strip()) and len(text) <= _LONGEST_NAME and text.isprintable()


def _listed(names: Collection[str]) -> str:
    return ", ".join(names)
