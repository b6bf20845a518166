"""Skeletons of mixtures as transformers has them, small enough to plan for in no time."""

from __future__ import annotations

from functools import cache

from offstage.stages.empty_init.describe import describe
from offstage.stages.plan.outline import Outline
from tests.stages.empty_init.test_experts import CONFIGS, on_meta


@cache
def mixture(name: str) -> Outline:
    """Return the outline of the mixture ``name``, whose experts are brought one by one where they lie elsewhere."""
    model = on_meta(CONFIGS[name])
    return Outline(describe(model, no_split=model._no_split_modules, rehearsed=False), routes=True)


def token_bytes(outline: Outline) -> int:
    """Return the bytes that one token computes with: of experts those that it uses."""
    stacked = sum(spec.per_token * outline.expert_kinds[module].bytes for module, spec in outline.experts.items())
    listed = sum(outline.sizes[name] * used // count for name, (count, used) in outline.listed.items())
    return outline.dense.skeleton.bytes + stacked + listed
