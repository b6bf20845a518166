"""How often runs of a checkpoint found the experts that they wanted in slots: noted once, planned with ever after.

Uniform routing is what can be said of a mixture that never ran. How skewed its routing really is shows in a run, and
belongs to its weights: so a rate is kept by the checkpoint's files, with the share of experts that slots hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offstage.pipeline.cache.fingerprint import fingerprint
from offstage.pipeline.stage import MEASURED, Context
from offstage.stages.checkpoints.hub import local_weights
from offstage.stages.machine.kept_figures import kept_or_measured
from offstage.stages.plan.expert_slots import Pool, rate_key
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.request.requests import asking

FILE_NAME = "hit_rates.json"
_PLACES = 3
_LEAST_STEPS = 16
"""Fewer steps of decoding tell more of the prefill, which filled the slots, than of what follows."""
_NEWS = 0.05
"""By which share of the bytes that its plan expected a rate brings more or less, if it is to be kept."""
_DEVIATIONS = 3
"""How many standard deviations from what was expected are more than chance: so far off is one run of hundreds."""


def kept_hit_rates(cache: Path, model: Mapping[str, Any]) -> dict[str, float]:
    """Return the rates that runs of the checkpoint of the config's ``model`` had, by ``rate_key``."""
    prefix = _prefix(model)
    kept = kept_or_measured(cache / MEASURED / FILE_NAME, {}, is_sound=is_share)
    return {key.removeprefix(prefix): rate for key, rate in kept.items() if key.startswith(prefix)}


def note_decoding(context: Context, plan: Plan, *, steps: int, calls: int, rate: float | None) -> None:
    """Keep which ``rate`` so many ``steps`` of decoding under ``plan`` had, of ``calls`` for experts, if that is news.

    A rate that is about what the plan expected isn't kept: it would have the same run planned anew and say nothing.
    Nor is one of several devices together, each of which has slots of its own.
    """
    if rate is None or steps < _LEAST_STEPS or len(plan.pools) != 1 or asking(context.config) != "generate":
        return
    ((device, pool),) = plan.pools.items()
    slots, expected = plan.slots[device], float(plan.forecast["expert_hit_rate"])
    if slots < pool.bytes and is_news(rate, expected, calls):
        tokens = plan.pass_tokens
        note_hit_rate(context.cache, context.config["model"], pool, slots=slots, tokens=tokens, rate=rate)


def note_hit_rate(cache: Path, model: Mapping[str, Any], pool: Pool, *, slots: int, tokens: int, rate: float) -> None:
    """Keep which ``rate`` a run had with so many bytes of ``slots`` for ``pool``, and ``tokens`` in a pass of decoding.

    Of equal runs the first counts: the plan of the others must not change with every run.
    """
    key = _prefix(model) + rate_key(pool, slots, tokens)
    kept_or_measured(cache / MEASURED / FILE_NAME, {key: lambda: round(rate, _PLACES)}, is_sound=is_share)


def is_news(rate: float, expected: float, calls: int) -> bool:
    """Return whether ``rate``, of so many ``calls``, brings other bytes than were ``expected``, and not by chance.

    Where nearly all is found, a little counts.
    """
    chance = _DEVIATIONS * math.sqrt(expected * (1 - expected) / max(1, calls))
    return abs(rate - expected) > max(_NEWS * (1 - expected), chance)


def is_share(figure: object) -> bool:
    """Return whether ``figure`` can be a rate of hits."""
    return isinstance(figure, int | float) and not isinstance(figure, bool) and 0 <= figure <= 1


def _prefix(model: Mapping[str, Any]) -> str:
    """Return what the keys of one checkpoint's rates begin with; files that were changed are another checkpoint."""
    files = [(path.name, path.stat()) for path in local_weights(model)]
    return fingerprint([[name, stat.st_size, stat.st_mtime_ns] for name, stat in files])[:16] + " "
