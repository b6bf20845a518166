"""How many prompts compute together where that is ours to choose: the size of batches, and how many go in lockstep.

A batch reads weights once for all of its sequences, so larger ones take fewer passes. Batches in lockstep share a pass
too, each computing what it computes alone. Either costs memory: where budgets are given, that which they leave; where
they are worked out, that of weights, which then stream. What it saves ends where computing takes longer than bringing
weights does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from offstage.stages.empty_init.skeleton import Skeleton
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.token_time import DEVICE_TOKENS, HOST_TOKENS
from offstage.stages.units import CPU

LARGEST_BATCH = 256
"""No batch has more prompts: a kill loses no more than one batch, and none waits for the slowest of thousands."""

MOST_TOGETHER = 64
"""No more batches go together: beyond, computing takes longer than any storage."""

COPIED_BYTES = 1 << 20
"""The largest tensor of a module that each call in lockstep has a copy of, where calls change it in place."""

_ALIKE = 1.05
"""Predicted times that are no further apart are alike."""


def batch_sizes(count: int) -> list[int]:
    """Return the sizes that are tried for ``count`` prompts, the largest first: two to each doubling, and all of them.

    Few, so that memory that is a little freer than a minute ago doesn't make another plan.
    """
    most = max(1, min(count, LARGEST_BATCH))
    steps = {size for power in range(most.bit_length()) for size in (2**power, 3 * 2**power // 2)}
    return sorted({most, *(size for size in steps if size <= most)}, reverse=True)


def lockstep_sizes(count: int) -> list[int]:
    """Return the numbers that are tried for ``count`` batches, the largest first: each doubling, and all of them."""
    most = max(1, min(count, MOST_TOGETHER))
    return sorted({most, *(2**power for power in range(most.bit_length()))}, reverse=True)


def why_not_in_lockstep(skeleton: Skeleton) -> str:
    """Return why calls of the model that ``skeleton`` describes can't go together, by its rehearsal; else nothing."""
    large = next((name for name in skeleton.written if skeleton.by_name[name].bytes > COPIED_BYTES), None)
    if large is None:
        return ""
    return f"one after another, not in lockstep: the model's own code changes {large!r} in place"


def choose(
    plans: Mapping[int, Plan],
    seconds: Callable[[int, Plan], float],
    *,
    prefer: Callable[[int, Plan], tuple[float, int]],
) -> Plan:
    """Return the one of ``plans``, by their sizes, that takes the fewest ``seconds``.

    Of those that are alike within a twentieth it is the one whose ``prefer`` is least.
    """
    taken = {size: seconds(size, plan) for size, plan in plans.items()}
    least = min(taken.values())
    alike = (size for size in plans if taken[size] <= least * _ALIKE)
    return plans[min(alike, key=lambda size: prefer(size, plans[size]))]


def choose_batch(plans: Mapping[int, Plan], *, count: int, copies: int, weights: int) -> Plan:
    """Return the one of ``plans``, by their batch sizes, that answers ``count`` prompts in the least predicted time.

    Each prompt is ``copies`` sequences; a token computes with ``weights`` bytes. Of those that are alike it is the one
    that streams the least, then that of the largest batch: beside a budget that is given, where the size moves no
    weight, that is the largest that fits.
    """

    def seconds(size: int, plan: Plan) -> float:
        full, rest = divmod(count, size)
        last = _step_seconds(plan, rest * copies, weights) if rest else 0
        return full * _step_seconds(plan, size * copies, weights) + last

    return choose(plans, seconds, prefer=lambda size, plan: (float(plan.forecast["streamed_bytes_per_token"]), -size))


def choose_lockstep(plans: Mapping[int, Plan]) -> Plan:
    """Return the one of ``plans``, by how many go together, under which tokens come soonest.

    Of those that are alike it is the one with the fewest: more would bring nothing.
    """
    return choose(plans, lambda _, plan: _token_seconds(plan), prefer=lambda size, _: (0.0, size))


def brings_more(plan: Plan, smaller: Mapping[int, Plan]) -> bool:
    """Return whether tokens come sooner under ``plan`` than with all ``smaller`` numbers, by more than is alike."""
    return _token_seconds(plan) * _ALIKE < min(map(_token_seconds, smaller.values()))


def _token_seconds(plan: Plan) -> float:
    return float(plan.forecast["seconds_per_token"])


def _step_seconds(plan: Plan, sequences: int, weights: int) -> float:
    """Return the seconds in which each of ``sequences`` gets a token, which computes with ``weights`` bytes.

    They are what the plan predicts for a token, or what the sequences take to compute, whichever is longer.
    """
    on_host = weights if plan.main_device == CPU else float(plan.forecast.get("host_read_bytes_per_token", 0))
    computing = on_host / plan.rates["host"] / HOST_TOKENS
    computing += max(0, weights - on_host) / _device_rate(plan) / DEVICE_TOKENS
    return max(_token_seconds(plan), computing * sequences)


def _device_rate(plan: Plan) -> float:
    """Return how fast accelerators read what they compute with, one after another, each what it has of the model."""
    rates, accelerators = plan.known_rates, [device for device in plan.devices if isinstance(device, int)]
    computed = {device: plan.devices[device].link_bytes + plan.devices[device].used_bytes for device in accelerators}
    if not (rates.devices and sum(computed.values())):
        return rates.device
    return sum(computed.values()) / sum(count / rates.device_of(device) for device, count in computed.items())
