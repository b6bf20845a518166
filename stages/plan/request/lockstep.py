"""How many batches go through the model in lockstep, each computing what it computes alone; see ``dispatch.streaming``.

A pass brings the weights once for all of them. What it costs is memory: each has keys and values of its own, and what
it keeps while others have their turn. What it saves ends where computing takes longer than bringing weights does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from offstage.pipeline.errors import Fault
from offstage.stages.empty_init.skeleton import Skeleton
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.request.assistant import KEY as ASSISTANT
from offstage.stages.plan.request.batch_size import ALIKE, AUTO
from offstage.stages.plan.request.speculation import LOOKUP, guesses_ahead, is_exact

KEY = "lockstep"

LARGEST = 64
"""No more batches go together: beyond, computing takes longer than any storage."""

COPIED_BYTES = 1 << 20
"""The largest tensor of a module that each call in lockstep has a copy of, where calls change it in place."""

_STATIC = ("static", "offloaded_static")


def lockstep_sizes(count: int) -> list[int]:
    """Return the numbers that are tried for ``count`` batches, the largest first: each doubling, and all of them."""
    most = max(1, min(count, LARGEST))
    return sorted({most, *(2**power for power in range(most.bit_length()))}, reverse=True)


def batches_in_lockstep(generate: Mapping[str, Any]) -> object:
    """Return how many batches the config node ``generate`` has go together: a number, or ``auto``.

    Where it says neither that nor how large a batch is, prompts are batches of their own, as many together as pay:
    each answer is the one that its prompt has alone, whatever else is asked.
    """
    given = generate.get(KEY)
    if given is not None:
        return given
    alone = generate.get("batch_size") is not None or guesses_ahead(generate) or any(_strangers(generate))
    return 1 if alone else AUTO


def is_in_lockstep(generate: Mapping[str, Any]) -> bool:
    """Return whether the config node ``generate`` may have more than one batch go at a time."""
    return batches_in_lockstep(generate) != 1


def lockstep_is_chosen(generate: Mapping[str, Any]) -> bool:
    """Return whether how many go together is ours to choose: a model that can't have them so is no fault then."""
    return batches_in_lockstep(generate) == AUTO


def why_not_in_lockstep(skeleton: Skeleton) -> str:
    """Return why calls of the model that ``skeleton`` describes can't go together, by its rehearsal; else nothing."""
    large = next((name for name in skeleton.written if skeleton.by_name[name].bytes > COPIED_BYTES), None)
    if large is None:
        return ""
    return f"one after another, not in lockstep: the model's own code changes {large!r} in place"


def check_lockstep(generate: Mapping[str, Any]) -> Iterable[Fault]:
    """Yield what is wrong with the number in the config node ``generate``, or doesn't go together with it."""
    size = generate.get(KEY)
    if size not in (None, AUTO) and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        rule = "give a whole number from 1, or auto for as many as fit and pay"
        yield Fault(f"generate.{KEY}", f"{size!r} is no number of batches; {rule}")
    elif size not in (None, 1):
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


def brings_more(plan: Plan, smaller: Mapping[int, Plan]) -> bool:
    """Return whether tokens come sooner under ``plan`` than with all ``smaller`` numbers, by more than is alike."""
    seconds = (float(other.forecast["seconds_per_token"]) for other in smaller.values())
    return float(plan.forecast["seconds_per_token"]) * ALIKE < min(seconds)


def soonest_in_lockstep(plans: Mapping[int, Plan]) -> Plan:
    """Return the one of ``plans``, by how many go together, under which tokens come soonest.

    Of those that are alike within a twentieth it is the one with the fewest: more would bring nothing.
    """
    seconds = {size: float(plan.forecast["seconds_per_token"]) for size, plan in plans.items()}
    least = min(seconds.values())
    return plans[min(size for size, taken in seconds.items() if taken <= least * ALIKE)]
