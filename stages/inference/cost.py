"""What forwards cost: seconds, the bytes that streamed for them, how long they waited, and what set their speed.

Of a mixture whose experts wait, it is also how often these were found in slots.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

from offstage.stages.dispatch.stage import Dispatched
from offstage.stages.dispatch.transfer.traffic import Traffic

Metrics = dict[str, float | int | str | None]
Bottleneck = Literal["storage", "host-to-device", "compute"]

STALL_SHARE = 0.1
"""Forwards that waited for at least this share of their seconds were held up by what they waited for."""


class ForwardCost:
    """Sums over the forwards of one run, from what ``traffic`` counts while they go on.

    ``seconds`` are those of all ``forwards`` together.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._traffic, self._before, self._results = traffic, traffic.copy(), 0
        self.seconds, self.forwards = 0.0, 0

    def add(self, seconds: float, *, results: int) -> None:
        """Add a forward that took so many ``seconds`` and gave so many ``results``: rows, or tokens."""
        self.seconds += seconds
        self.forwards += 1
        self._results += results

    @property
    def results_per_second(self) -> float | None:
        """How many results came in a second; null where there was no forward."""
        return self._per_second(self._results)

    def metrics(self) -> Metrics:
        """Return the run record's metrics of all forwards; null where there was none."""
        cost = self._traffic.copy().since(self._before)
        return {
            "streamed_bytes_per_forward": round(cost.streamed_bytes / self.forwards) if self.forwards else None,
            "streamed_bytes_per_second": self._per_second(cost.streamed_bytes),
            "stall_share": self._per_second(cost.stall_seconds),
            "bottleneck": bottleneck_of(self.seconds, cost) if self.forwards else None,
            **link_metrics(cost, unit="forward", count=self.forwards),
        }

    def _per_second(self, total: float) -> float | None:
        """Return what of ``total`` falls to each second of the forwards."""
        return total / self.seconds if self.seconds > 0 else None


def bottleneck_of(seconds: float, cost: Traffic) -> Bottleneck:
    """Return what forwards of so many ``seconds`` and this ``cost`` waited for: reads from storage, the link, or
    neither: they computed.

    A forward that waits where nothing is read waits for copies. Where weights come from storage and from the host, the
    wait is put down to storage, the slower of the two. Pages of a mapped file that had to be read are not seen: a map
    is chosen where they stay in memory.
    """
    if cost.stall_seconds < STALL_SHARE * seconds:
        return "compute"
    return "storage" if cost.storage_bytes else "host-to-device"


def link_metrics(cost: Traffic, *, unit: str, count: int) -> Metrics:
    """Return the run record's metrics of each device that something was brought to, by the ``unit``.

    There were ``count`` of these; where there was none, there are no metrics.
    """
    metrics: Metrics = {}
    for device, link in cost.links.items() if count else ():
        metrics[f"transfer_bytes_per_{unit}.{device}"] = round(link.bytes / count)
        metrics[f"transfer_stall_seconds_per_{unit}.{device}"] = link.stall_seconds / count
    return metrics


def run_metrics(dispatched: Dispatched, own: Metrics) -> Metrics:
    """Return a stage's ``own`` metrics amid those of the whole run: of loading, of all that streamed, of its experts.

    Of the rate of hits a stage may know better: that of decoding alone. What the process held before any weight is
    among them, since the peaks that are measured have it too.
    """
    traffic = dispatched.streamer.traffic.copy()
    return {
        "load_seconds": dispatched.load_seconds,
        **_expert_metrics(dispatched),
        **own,
        "storage_read_bytes": dispatched.read_bytes + traffic.storage_bytes,
        "stall_seconds": traffic.stall_seconds,
        **{f"transfer_stall_seconds.{device}": link.stall_seconds for device, link in traffic.links.items()},
        "base_host_bytes": dispatched.base_bytes,
    }


def expert_uses(dispatched: Dispatched) -> dict[str, dict[str, int]]:
    """Return what the experts of each layer that wait came to in the whole run, by their module."""
    return {module: asdict(use) for module, use in dispatched.streamer.routed.uses.items()}


def _expert_metrics(dispatched: Dispatched) -> Metrics:
    """Return the run record's metrics of experts that wait; none where none do."""
    uses, traffic = dispatched.streamer.routed.uses.values(), dispatched.streamer.traffic
    if not uses:
        return {}
    return {
        "expert_hit_rate": traffic.expert_hit_rate,
        "expert_hits": traffic.expert_hits,
        "expert_misses": traffic.expert_misses,
        "expert_evictions": sum(use.evictions for use in uses),
    }
