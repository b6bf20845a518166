"""The hosts that a run is divided among, as ``hardware`` describes them: how many, what each has, what lies between.

Each is an ordinary machine; here stands only what a config says of several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from offstage.pipeline.errors import ConfigError, Fault
from offstage.pipeline.peers import own_rank, started_together
from offstage.stages.machine.rates import parse_rate

KEY = "hardware.hosts"
AUTO = "auto"
_HOST_KEYS = ("devices", "host", "rates", "max_memory")
_NETWORK_KEYS = ("rate", "latency")


@dataclass(frozen=True, slots=True)
class Network:
    """What lies between hosts: ``rate`` in bytes a second, ``latency`` in seconds of one message."""

    rate: int
    latency: float


_NOMINAL = Network(rate=1_200_000_000, latency=0.0002)


def host_count(hardware: Mapping[str, Any]) -> int:
    """Return how many hosts ``hardware`` says that a run is divided among; 1 where it says nothing of them."""
    hosts = hardware.get("hosts")
    if hosts is None:
        return 1
    return started_together() if hosts == AUTO else hosts if isinstance(hosts, int) else len(hosts)


def own_host(hardware: Mapping[str, Any]) -> int:
    """Return the number of the host that this process is; the first where others are described and not there."""
    return own_rank() if host_count(hardware) > 1 else 0


def is_described(hardware: Mapping[str, Any]) -> bool:
    """Return whether what the hosts have is given, and not asked of them."""
    return hardware.get("hosts") not in (None, AUTO)


def host_config(config: Mapping[str, Any], host: int) -> dict[str, Any]:
    """Return ``config`` as ``host`` has it: its own devices, memory, rates and budgets where the list gives them."""
    described = config.get("hardware") or {}
    hosts = described.get("hosts")
    own = hosts[host] if isinstance(hosts, list) else {}
    machine = {name: own.get(name, described.get(name)) for name in ("devices", "host", "rates")}
    budgets = own.get("max_memory", config.get("max_memory"))
    return {**config, "max_memory": budgets, "hardware": {**described, **machine}}


def read_network(hardware: Mapping[str, Any]) -> Network:
    """Return what ``hardware.network`` says, or a nominal network of 10 Gbit/s."""
    given = hardware.get("network") or {}
    rate, latency = given.get("rate"), given.get("latency")
    return Network(
        _NOMINAL.rate if rate is None else parse_rate(rate), _NOMINAL.latency if latency is None else latency
    )


def hosts_faults(hardware: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield what is wrong with ``hardware.hosts`` and ``hardware.network``, but for what a host has."""
    hosts, network = hardware.get("hosts"), hardware.get("network")
    is_count = isinstance(hosts, int) and not isinstance(hosts, bool) and hosts > 1
    if hosts not in (None, AUTO) and not is_count and not (isinstance(hosts, list) and len(hosts) > 1):
        yield Fault(
            KEY,
            f"{hosts!r} names no hosts; give null for one, {AUTO} for those that torchrun started, how many alike ones "
            "there are, from 2 up, or a list of {devices, host, rates, max_memory}",
        )
    for index, own in enumerate(hosts if isinstance(hosts, list) else ()):
        unknown = [key for key in own if key not in _HOST_KEYS] if isinstance(own, Mapping) else [""]
        if unknown:
            what = f"unknown key {unknown[0]!r}" if unknown[0] else f"{own!r} is no host"
            yield Fault(f"{KEY}[{index}]", f"{what}; a host has {', '.join(_HOST_KEYS)}")
    if network is not None and not isinstance(network, Mapping):
        yield Fault("hardware.network", f"{network!r} is no mapping; give {{rate: 1.2GB, latency: 0.0002}}, or null")
        return
    for key, value in (network or {}).items():
        yield from _network_faults(str(key), value)


def _network_faults(key: str, value: object) -> Iterator[Fault]:
    if key == "rate":
        try:
            parse_rate(value)  # type: ignore[arg-type]
        except ValueError as error:
            yield Fault("hardware.network.rate", str(error))
    elif key not in _NETWORK_KEYS:
        yield Fault(f"hardware.network.{key}", f"unknown key; there are {', '.join(_NETWORK_KEYS)}")
    elif isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        yield Fault("hardware.network.latency", f"{value!r} is no number of seconds; give one from 0 up")


def require_started(hardware: Mapping[str, Any], *, is_plan: bool) -> None:
    """Refuse to run on hosts that aren't there: a ``ConfigError`` says how they are started. A plan needs none."""
    count, started = host_count(hardware), started_together()
    if count == started or (is_plan and started == 1):
        return
    raise ConfigError(
        f"{KEY}: {count} hosts are described, and the run has {started} process{'es' * (started > 1)}; start it with "
        f"torchrun --nnodes {count} … -m offstage …, one on each, or take stages=plan_only"
    )
