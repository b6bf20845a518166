"""The least seconds that a token could have taken: what was measured to move for it, at the rates of its plan."""

from __future__ import annotations

from collections import Counter

from offstage.stages.machine.rates import known_rates
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.token_time import Brought, HostShare, LayerOutput, slowest, token_seconds
from offstage.stages.units import CPU, DISK


def bound_seconds(plan: Plan, *, streamed_bytes: float, storage_bytes: float, members: float = 1) -> float:
    """Return the least seconds of a token in a pass for which so much was streamed, ``storage_bytes`` of it read.

    A pass has a token for each of ``members``. The rates are those that ``plan`` was made with.
    """
    expected = float(plan.forecast.get("streamed_bytes_per_token", 0))
    share = streamed_bytes / expected if expected else 0.0
    packed, unpacked, unpacked_there, moved = (
        float(plan.forecast.get(f"{kind}_bytes_per_token", 0)) * share
        for kind in ("packed", "unpacked", "device_unpacked", "device_moved")
    )
    streamed = Counter({DISK: storage_bytes, CPU: streamed_bytes - storage_bytes})
    over_links = sum(plan.link_bytes_per_token.values())
    shares = {device: count / over_links for device, count in plan.link_bytes_per_token.items() if over_links}
    used = streamed_bytes - packed + unpacked
    computed = Counter({device: used * of_all for device, of_all in (shares or {CPU: 1.0}).items()})
    less = max(0.0, used - over_links * share) if moved else 0.0
    saved = Counter({device: less * of_all for device, of_all in shares.items()})
    ahead = 1 - float(plan.forecast.get("expert_bytes_per_token", 0)) / expected if expected else 1.0
    brought = Brought(streamed, packed, unpacked, computed, unpacked_there=unpacked_there, saved=saved)
    brought.moved = Counter({device: moved * of_all for device, of_all in shares.items()})
    brought.runs = [(device, count * ahead) for device, count in computed.items()]
    rates = known_rates(plan.rates, plan.device_rates)
    on_host = _forecast_share(plan) if plan.host_layers else None
    seconds = token_seconds(brought, plan.used_bytes, rates=rates, members=members, on_host=on_host)
    return slowest(seconds)[1]


def _forecast_share(plan: Plan) -> HostShare:
    """Return what the host computes of a token beside accelerators, as it was predicted."""
    read, crossings, crossing = (
        int(plan.forecast.get(f"{name}_per_token", 0)) for name in ("host_read_bytes", "crossings", "crossing_bytes")
    )
    return HostShare(read, crossings, LayerOutput(bytes=round(crossing / crossings) if crossings else 0))
