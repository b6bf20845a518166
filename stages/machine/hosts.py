"""The hosts that a run is divided among, as ``hardware`` describes them: how many, what each has, what lies between.

Each is an ordinary machine; here stands only what a config says of several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.peers import own_rank, started_together
from offstage.pipeline.rendezvous import HostError
from offstage.stages.machine.rates import parse_rate

KEY, EXACT_KEY = "hardware.hosts", "hardware.exact_hosts"
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Network:
    """What lies between hosts: ``rate`` in bytes a second, ``latency`` in seconds of one message."""

    rate: int
    latency: float


_NOMINAL = Network(rate=1_200_000_000, latency=0.0002)


def host_count(hardware: Mapping[str, Any]) -> int:
    """Return how many hosts ``hardware`` says that a run is divided among; 1 where it names none."""
    hosts = hardware.get("hosts")
    if isinstance(hosts, list):
        return len(hosts)
    return started_together() if hosts == AUTO else hosts if isinstance(hosts, int) else 1


def own_host(hardware: Mapping[str, Any]) -> int:
    """Return the number of the host that this process is; the first where others are described and not there."""
    return own_rank() if host_count(hardware) > 1 else 0


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


def unlike(capabilities: Sequence[Mapping[str, str]]) -> str:
    """Return in words how the kernels of one host are others than those of host 0, whose ``capabilities`` are the
    first; nothing where all are alike.
    """
    first = capabilities[0] if capabilities else {}
    for host, own in enumerate(capabilities):
        differing = [name for name in sorted(first.keys() | own.keys()) if first.get(name) != own.get(name)]
        if differing:
            own_words, first_words = (
                ", ".join(f"{name} {one.get(name, 'unset')}" for name in differing) for one in (own, first)
            )
            return f"host {host} computes with {own_words}, host 0 with {first_words}"
    return ""


def require_alike(hardware: Mapping[str, Any], capabilities: Sequence[Mapping[str, str]]) -> None:
    """Raise ``HostError`` where ``hardware`` asks for hosts whose last bits are the same, and their kernels differ."""
    if hardware.get("exact_hosts") and (difference := unlike(capabilities)):
        raise HostError(
            f"{EXACT_KEY}: {difference}, so last bits, and tokens, may be others than on one host; have the same on "
            "all, or leave the key out"
        )


def require_started(hardware: Mapping[str, Any], *, is_plan: bool) -> None:
    """Refuse to run on hosts that aren't there: a ``ConfigError`` says how they are started. A plan needs none."""
    count, started = host_count(hardware), started_together()
    if count == started or (is_plan and started == 1):
        return
    raise ConfigError(
        f"{KEY}: {count} hosts are described, and the run has {started} process{'es' * (started > 1)}; start it with "
        f"torchrun --nnodes {count} … -m offstage …, one on each, or take stages=plan_only"
    )
