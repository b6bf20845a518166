"""Which batch size ``auto`` comes to: of those that fit, the one by which all prompts are answered soonest.

A batch reads weights once for all of its sequences, so larger ones take fewer passes. What it costs is memory: where
budgets are given, that which they leave; where they are worked out, that of weights, which then stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from offstage.stages.machine.rates import known_rates
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.token_time import DEVICE_TOKENS, HOST_TOKENS
from offstage.stages.units import CPU

AUTO = "auto"

LARGEST = 256
"""No batch has more prompts: a kill loses no more than one batch, and none waits for the slowest of thousands."""

ALIKE = 1.05
"""Predicted times that are no further apart are alike."""


def batch_sizes(count: int) -> list[int]:
    """Return the sizes that are tried for ``count`` prompts, the largest first."""
    return sizes_to_try(min(count, LARGEST))


def sizes_to_try(most: int) -> list[int]:
    """Return numbers up to ``most``, the largest first: two to each doubling, and ``most`` itself, at least 1.

    Few, so that memory that is a little freer than a minute ago doesn't make another plan.
    """
    most = max(1, most)
    steps = {size for power in range(most.bit_length()) for size in (2**power, 3 * 2**power // 2)}
    return sorted({most, *(size for size in steps if size <= most)}, reverse=True)


def soonest(plans: Mapping[int, Plan], *, count: int, copies: int, weights: int) -> Plan:
    """Return the one of ``plans``, by their batch sizes, that answers ``count`` prompts in the least predicted time.

    Each prompt is ``copies`` sequences; a token computes with ``weights`` bytes. A step of a batch takes what the plan
    predicts for a token, or what its sequences take to compute, whichever is longer. Of plans that are alike within a
    twentieth it is the one that streams the least, then that of the largest batch: beside a budget that is given, where
    the size moves no weight, that is the largest that fits.
    """

    def seconds(size: int) -> float:
        full, rest = divmod(count, size)
        return full * step_seconds(plans[size], size * copies, weights) + (
            step_seconds(plans[size], rest * copies, weights) if rest else 0
        )

    least = min(map(seconds, plans))
    alike = [size for size in plans if seconds(size) <= least * ALIKE]
    return plans[min(alike, key=lambda size: (plans[size].forecast["streamed_bytes_per_token"], -size))]


def step_seconds(plan: Plan, sequences: int, weights: int) -> float:
    """Return the seconds in which each of ``sequences`` gets a token, which computes with ``weights`` bytes."""
    on_host = weights if plan.main_device == CPU else float(plan.forecast.get("host_read_bytes_per_token", 0))
    computing = on_host / plan.rates["host"] / HOST_TOKENS
    computing += max(0, weights - on_host) / _device_rate(plan) / DEVICE_TOKENS
    return max(float(plan.forecast["seconds_per_token"]), computing * sequences)


def _device_rate(plan: Plan) -> float:
    """Return how fast accelerators read what they compute with, one after another, each what it has of the model."""
    rates = known_rates(plan.rates, plan.device_rates)
    computed = Counter(plan.link_bytes_per_token) + Counter(
        {device: count for device, count in plan.used_bytes.items() if isinstance(device, int)}
    )
    if not (plan.device_rates and computed):
        return rates.device
    return computed.total() / sum(count / rates.device_of(device) for device, count in computed.items())
