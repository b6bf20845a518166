"""How many batches go through the model in lockstep, each computing what it computes alone; see ``dispatch.streaming``.

A pass brings the weights once for all of them. What it costs is memory: each has keys and values of its own, and what
it keeps while others have their turn. What it saves ends where computing takes longer than bringing weights does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.errors import Fault
from stages.plan.plan import Plan
from stages.plan.request.assistant import KEY as ASSISTANT
from stages.plan.request.batch_size import ALIKE, AUTO, sizes_to_try
from stages.plan.request.speculation import LOOKUP, is_exact

KEY = "lockstep"

LARGEST = 64
"""No more batches go together: beyond, computing takes longer than any storage."""

_STATIC = ("static", "offloaded_static")


def lockstep_sizes(count: int) -> list[int]:
    """Return the numbers that are tried for ``count`` batches, the largest first."""
    return sizes_to_try(min(count, LARGEST))


def is_in_lockstep(generate: Mapping[str, Any]) -> bool:
    """Return whether the config node ``generate`` asks for more than one batch at a time."""
    return generate.get(KEY) not in (None, 1)


def check_lockstep(generate: Mapping[str, Any]) -> Iterable[Fault]:
    """Yield what is wrong with the number in the config node ``generate``, or doesn't go together with it."""
    size = generate.get(KEY)
    if size not in (None, AUTO) and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        rule = "give a whole number from 1, or auto for as many as fit and pay"
        yield Fault(f"generate.{KEY}", f"{size!r} is no number of batches; {rule}")
    elif is_in_lockstep(generate):
        yield from _strangers(generate)


def _strangers(generate: Mapping[str, Any]) -> Iterable[Fault]:
    if generate.get("batch_size") == AUTO and generate.get(KEY) == AUTO:
        yield Fault(f"generate.{KEY}", "batch_size is auto too; give a number for one of them")
    guesses = ASSISTANT if generate.get(ASSISTANT) else LOOKUP if generate.get(LOOKUP) and is_exact(generate) else None
    if guesses:
        yield Fault(f"generate.{KEY}", f"with {guesses} prompts are answered one at a time; leave one of them out")
    if generate.get("cache_implementation") in _STATIC:
        yield Fault(
            f"generate.{KEY}",
            f"a model has one {generate['cache_implementation']} cache, and each batch needs one of its own; leave "
            "generate.cache_implementation out",
        )


def soonest_in_lockstep(plans: Mapping[int, Plan]) -> Plan:
    """Return the one of ``plans``, by how many go together, under which tokens come soonest.

    Of those that are alike within a twentieth it is the one with the fewest: more would bring nothing.
    """
    seconds = {size: float(plan.forecast["seconds_per_token"]) for size, plan in plans.items()}
    least = min(seconds.values())
    return plans[min(size for size, taken in seconds.items() if taken <= least * ALIKE)]
