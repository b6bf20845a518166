"""The hosts that a run is divided among, as ``hardware`` describes them: how many, what each has, what lies between.

Each is an ordinary machine; here stands only what a config says of several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.peers import own_rank, started_together
from offstage.stages.machine.rates import parse_rate

KEY = "hardware.hosts"
AUTO = "auto"


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


def require_started(hardware: Mapping[str, Any], *, is_plan: bool) -> None:
    """Refuse to run on hosts that aren't there: a ``ConfigError`` says how they are started. A plan needs none."""
    count, started = host_count(hardware), started_together()
    if count == started or (is_plan and started == 1):
        return
    raise ConfigError(
        f"{KEY}: {count} hosts are described, and the run has {started} process{'es' * (started > 1)}; start it with "
        f"torchrun --nnodes {count} … -m offstage …, one on each, or take stages=plan_only"
    )
