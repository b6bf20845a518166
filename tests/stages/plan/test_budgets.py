"""Budgets that are worked out: what they leave to all else, term by term, and what a plan makes of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from offstage.pipeline.errors import BudgetError
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.init import init_empty_weights
from offstage.stages.plan.budgets import LEAST_LIBRARY_BYTES, LEAST_MARGIN, LIBRARY_BYTES
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.plan import Plan
from tests.benchmarks.checkpoints import MIXTURES
from tests.stages.plan.plans import make_plan

MB = 10**6
HEAD = "lm_head.weight"
CAPS = [*range(430, 1000, 15)]
UNUSED = 0.06
"""The most of a host's memory that is nobody's where weights are streamed."""
SLOWER = 1.03


@cache
def wide(*, exact: bool = True, dtype: torch.dtype = torch.bfloat16) -> Outline:
    """Return a Llama of 380 MB in bfloat16, of which the table has 65 MB and the head as much."""
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=10, num_attention_heads=8, vocab_size=32_000
    )
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    outline = Outline(describe(model, no_split=model._no_split_modules))
    return replace(outline, exact=lambda: ("bfloat16", "float32")) if exact else outline


@cache
def plain() -> Outline:
    """Return the same in float32, whose products take nothing beside a weight."""
    return wide(dtype=torch.float32)


@cache
def sparse() -> Outline:
    """Return a mixture of 250 MB, whose experts are brought one by one where they lie elsewhere."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(MIXTURES["qwen3-moe"], dtype=torch.bfloat16)
    return Outline(describe(model, no_split=model._no_split_modules), routes=True)


def planned(outline: Outline, megabytes: int, **changes: Any) -> Plan:
    """Return the plan of a short prompt by a budget that is worked out, on a host of so many MB."""
    config = {
        "max_memory": {}, "device_map": "optimal", "storage": {"io": "direct"}, "model": {},
        "hardware": {"devices": [], "host": {"memory": megabytes * MB}},
        "generate": {"prompts": [[5, 6, 7, 8]], "max_new_tokens": 8}, **changes,
    }  # fmt: skip
    return make_plan(outline, config)


def unused(plan: Plan) -> int:
    """Return the bytes that neither the plan's peak nor what is left to libraries and as a margin takes."""
    terms = plan.devices["cpu"].budget_terms
    return terms["available"] + terms["libraries"] + terms["margin"] - sum(plan.predicted["cpu"].values())


def test_a_budget_is_the_sum_of_its_terms_and_what_they_leave_is_left() -> None:
    for megabytes in (CAPS[0], 600, 2000):
        plan = planned(wide(), megabytes)
        terms = plan.devices["cpu"].budget_terms
        assert plan.budgets["cpu"] == sum(terms.values())
        assert terms["available"] == megabytes * MB
        assert LEAST_LIBRARY_BYTES <= -terms["libraries"] <= LIBRARY_BYTES
        assert -terms["margin"] == round(LEAST_MARGIN * megabytes * MB)
        assert unused(plan) >= 0


@pytest.mark.parametrize("model", [wide, plain, sparse], ids=["dense", "float32", "mixture"])
def test_a_larger_host_is_used_and_no_slower(model: Callable[[], Outline]) -> None:
    plans = [planned(model(), megabytes) for megabytes in CAPS]
    seconds = [plan.forecast["seconds_per_token"] for plan in plans]
    assert all(later <= SLOWER * min(seconds[: at + 1]) for at, later in enumerate(seconds[1:]))
    for megabytes, plan in zip(CAPS, plans, strict=True):
        assert not plan.forecast["streamed_bytes_per_token"] or unused(plan) <= UNUSED * megabytes * MB, megabytes


def test_a_head_that_comes_by_blocks_leaves_what_a_product_with_it_takes_to_weights() -> None:
    divided, whole = planned(wide(), 600), planned(wide(exact=False), 600)
    assert set(divided.block_rows) == {HEAD}
    assert not whole.block_rows
    saved = divided.devices["cpu"].budget_terms["request"] - whole.devices["cpu"].budget_terms["request"]
    assert saved > wide().sizes[HEAD] // 2
    assert divided.budgets["cpu"] == whole.budgets["cpu"] + saved
    assert divided.forecast["streamed_bytes_per_token"] < whole.forecast["streamed_bytes_per_token"] - saved // 2


def test_a_head_that_has_room_stays_where_nothing_else_would() -> None:
    assert not planned(wide(), 900).block_rows
    given = planned(wide(), 5000, max_memory={"cpu": "250MB"})
    assert not given.block_rows, "a given budget doesn't hang on what else is taken"


def test_where_a_head_comes_by_blocks_the_least_that_works_is_less_and_works() -> None:
    with pytest.raises(BudgetError) as refused:
        planned(wide(), 390)
    least = int(re.findall(r"the least that works is (\d+) bytes", str(refused.value))[0])
    config = {"devices": [], "host": {"memory": least}}
    assert planned(wide(), 0, hardware=config).block_rows
    with pytest.raises(BudgetError):
        planned(wide(), 0, hardware={"devices": [], "host": {"memory": least - 5000}})
    with pytest.raises(BudgetError):
        planned(wide(exact=False), 0, hardware=config)


def test_what_experts_pass_through_on_the_host_is_a_term() -> None:
    model = sparse()
    tight, roomy = planned(model, 420), planned(model, 5000)
    assert -tight.devices["cpu"].budget_terms["staging"] == tight.predicted["cpu"]["staging"] > 0
    assert "staging" not in roomy.devices["cpu"].budget_terms


def test_a_table_that_stays_is_not_read_by_a_token() -> None:
    plan = planned(wide(), 5000)
    assert set(plan.homes.values()) == {"cpu"}
    assert plan.used_bytes["cpu"] == wide().skeleton.bytes - wide().sizes["model.embed_tokens.weight"]
