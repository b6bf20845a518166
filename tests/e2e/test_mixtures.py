"""A mixture answers as the plain model in memory does, whichever of its experts are brought and kept.

Each architecture takes its turn under few settings that mix what can differ: the budget, the device, the lengths of
prompts, how many at once, beams. ``OFFSTAGE_GRID=40`` draws so many of all settings for each, ``OFFSTAGE_GRID=216`` has
them all. What is loaded alike is loaded once, and answers one prompt after the other.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    JambaConfig,
    PhimoeConfig,
    PretrainedConfig,
)

import offstage
from offstage.pipeline.errors import BudgetError
from tests.long_form import in_ci
from tests.stages.dispatch.experts.mixtures import CONFIGS, SIZES

pytestmark = pytest.mark.long_form
"""What it shows of whole runs, tests of the stages show of these."""

EIGHT = {**SIZES, "num_local_experts": 8}
ALL: Mapping[str, PretrainedConfig] = {
    **CONFIGS,
    "GLM-4-MoE": Glm4MoeConfig(
        **SIZES, n_routed_experts=8, moe_intermediate_size=32, first_k_dense_replace=1, n_group=2, topk_group=1,
        head_dim=16,
    ),
    "Ernie 4.5 MoE": Ernie4_5_MoeConfig(**SIZES, moe_num_experts=8, moe_k=2, moe_intermediate_size=32),
    "PhiMoE": PhimoeConfig(**EIGHT),
    "Jamba": JambaConfig(**SIZES, num_experts=8, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False),
}  # fmt: skip
MOST, NEW = 512, 4
ROWS = [1, 40, 400]
SHARES = ("least", 0.1, 0.25, 0.5, 0.75, "all")
FEW = [("least", "disk", 4, 40, 1), (0.5, "accelerator", 1, 400, 3), (0.25, "host", 1, 1, 1)]
WHOLE = list(product(SHARES, ("disk", "host", "accelerator"), (1, 4), ROWS, (1, 3)))
"""The share of the weights that the budget holds, where they compute, the batch, the prompt, the beams."""
DRAWN = min(int(os.environ.get("OFFSTAGE_GRID", "0")), len(WHOLE))


@pytest.fixture(scope="module", params=in_ci("gpt-oss", of=ALL))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("mixtures") / request.param
    config = ALL[request.param]
    config.eos_token_id = None
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="100KB")
    return folder


def padded(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Return ``batch`` prompts, the first of ``length`` tokens and each other one shorter, padded on the left."""
    torch.manual_seed(length)
    tokens, mask = torch.randint(2, 96, (batch, length)), torch.ones(batch, length, dtype=torch.long)
    for row in range(batch):
        missing = length * row // 5
        tokens[row, :missing], mask[row, :missing] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


def answers(model: Any, prompts: Mapping[str, torch.Tensor], beams: int) -> list[torch.Tensor]:
    """Return the logits of ``prompts``, and the tokens that greedy decoding or a search by beams makes of them."""
    with torch.inference_mode():
        logits = model(**prompts).logits
    return [logits, model.generate(**prompts, max_new_tokens=NEW, do_sample=False, num_beams=beams)]


def load(checkpoint: Path, budgets: Mapping[Any, int], device_map: str = "optimal", *, batch: int) -> Any:
    hardware = {"devices": [{"memory": "1GB"}]} if 0 in budgets else {"devices": []}
    return offstage.load(
        checkpoint, max_memory=budgets, device_map=device_map, cache=checkpoint / "cache", hardware=hardware,
        storage={"io": "direct"}, batch_size=batch, max_length=MOST,
    )  # fmt: skip


@cache
def least_budget(checkpoint: Path, device: int | str, device_map: str) -> int:
    """Return the least budget of ``device`` that works, as the refusal of next to nothing says it."""
    with pytest.raises(BudgetError) as refusal:
        load(checkpoint, {device: 1, "cpu": 1}, device_map, batch=1)
    (least,) = re.findall(r"the least that works is (\d+) bytes", str(refusal.value))
    return int(least)


def loaded(checkpoint: Path, share: str | float, place: str, batch: int, *, weights: int) -> Any:
    """Load ``checkpoint``, of so many bytes of ``weights``, as a setting of the grid says."""
    device_map = "disk" if place == "disk" else "optimal"
    device = 0 if place == "accelerator" else "cpu"
    least = least_budget(checkpoint, device, device_map)
    budget = least if share == "least" else 2 * weights if share == "all" else max(least, round(float(share) * weights))
    return load(checkpoint, {device: budget, "cpu": budget}, device_map, batch=batch)


def drawn(name: str) -> dict[tuple[Any, ...], list[tuple[int, int]]]:
    """Return the settings of the architecture ``name``: what is asked of the model by how it is loaded."""
    settings: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for share, place, batch, length, beams in random.Random(name).sample(WHOLE, DRAWN) or FEW:
        settings.setdefault((share, place, batch), []).append((length, beams))
    return settings


def test_a_mixture_answers_as_the_plain_model_does(checkpoint: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    weights = sum(parameter.nbytes for parameter in plain.parameters())
    expected = cache(lambda batch, length, beams: answers(plain, padded(batch, length), beams))
    routed = 0
    for way, asked in drawn(checkpoint.name).items():
        with loaded(checkpoint, *way, weights=weights) as streamed:
            for length, beams in asked:
                batch = way[-1]
                streamed_answers = answers(streamed.model, padded(batch, length), beams)
                for got, wanted in zip(streamed_answers, expected(batch, length, beams), strict=True):
                    assert torch.equal(got, wanted), (*way, length, beams)
            routed += "experts" in streamed.plan.serving.values()
    assert routed, "its experts are brought one by one"
