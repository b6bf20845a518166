"""Which is better on an accelerator, weights or the KV cache: told where the other choice would be sooner.

A byte of weights that is resident there saves a byte of its link for each pass, or of storage. A byte of the cache
saves one of its link too, but only once it is filled, which half of it is on average where answers are long. Sequences
that go together share weights, and each has a cache of its own: both are told by what a pass takes.
"""

from __future__ import annotations

from collections.abc import Iterator

from offstage.stages.inputs.generate_options import CACHE, OFFLOADED
from offstage.stages.machine.rates import Rates
from offstage.stages.plan.layout import Layout
from offstage.stages.plan.memory_needs import MemoryNeeds, cache_bytes
from offstage.stages.units import CPU, DISK, DeviceId, format_bytes

_WORTH = 0.05
"""The share of a token's seconds that the other choice must save, before it is told."""


def cache_notes(layout: Layout, needs: MemoryNeeds, rates: Rates, *, seconds: float, members: int) -> Iterator[str]:
    """Yield for each accelerator what another home of its cache would save of a token's ``seconds``, where it is much.

    A pass is of so many ``members``.
    """
    for device in layout.rooms:
        saved = _saved(layout, needs, rates, device) / members if isinstance(device, int) else 0.0
        if not isinstance(device, int) or saved < _WORTH * seconds:
            continue
        size = format_bytes(sum(cache.most for cache in needs.caches if layout.block_device(cache.block) == device))
        if needs.apart_bytes:
            yield (
                f"accelerator {device}: its KV cache of {size} waits on the host; in place of as many bytes of weights "
                f"there it would save about {saved:.2g} s a token"
            )
        else:
            yield (
                f"accelerator {device}: weights in place of its KV cache of {size} would save about {saved:.2g} s a "
                f"token; have that wait on the host: generate.{CACHE}={OFFLOADED}"
            )


def _saved(layout: Layout, needs: MemoryNeeds, rates: Rates, device: DeviceId) -> float:
    """Return the seconds of a pass that the other home of the cache would save; less than 0 where it costs some."""
    mine = [cache for cache in needs.caches if cache.grows and layout.block_device(cache.block) == device]
    passing = cache_bytes(tuple(cache.on_host() for cache in mine), lambda _: device).get(device, 0)
    freed = max(0, sum(cache.most for cache in mine) - passing)
    crossing = sum(cache.prompted + cache.finished for cache in mine) / 2 / rates.link_of(device)
    streamed = [line for line in layout.streamed if line.computes == device]
    if needs.apart_bytes:
        resident = layout.weights.get(device, 0)
        return crossing - freed / rates.link_of(device) if freed <= resident else 0.0
    away = sum(line.bytes for line in streamed if line.home == DISK)
    first = min(freed, away) / min(rates.storage, rates.link_of(device))
    rest = min(max(0, freed - away), sum(line.bytes for line in streamed if line.home == CPU))
    return first + rest / rates.link_of(device) - crossing
