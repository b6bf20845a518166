"""Calls in lockstep bring the experts of all of them once, however few slots there are, and compute as each alone."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import offstage
from offstage.pipeline.errors import BudgetError
from offstage.stages.dispatch.experts.routed_experts import RoutedExperts
from offstage.stages.dispatch.loaded_model import LoadedModel
from offstage.stages.dispatch.streaming.streamer import streamer_of
from tests.stages.dispatch.experts.mixtures import mixture

PROMPTS = [torch.arange(2 + first, 34 + first)[None] for first in (0, 9, 20, 31)]


def opened(folder: Path, budget: int) -> LoadedModel:
    return offstage.load(
        folder / "checkpoint", cache=folder / "cache", max_memory={"cpu": budget}, device_map="disk",
        storage={"io": "direct"}, hardware={"devices": []},
    )  # fmt: skip


def least_budget(folder: Path) -> int:
    with pytest.raises(BudgetError) as refusal:
        opened(folder, 1)
    (least,) = re.findall(r"the least that works is (\d+) bytes", str(refusal.value))
    return int(least)


def brought(loaded: LoadedModel) -> int:
    """Return the bytes of experts that were brought so far."""
    return sum(use.streamed_bytes for use in streamer_of(loaded.model).routed.uses.values())


def saved(folder: Path, name: str, experts: str | None) -> Any:
    model = mixture(name, experts=experts or "grouped_mm")
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(folder / "checkpoint")
    return model


@pytest.mark.parametrize(
    ("name", "experts", "beside"),
    [
        ("Mixtral", "grouped_mm", 0),
        ("gpt-oss", "eager", 20_000),
        ("Llama 4", None, 60_000),
    ],
)
def test_prompts_that_are_read_together_bring_an_expert_once(
    name: str, experts: str | None, beside: int, tmp_path: Path
) -> None:
    check(tmp_path, name, experts, beside)


def check(tmp_path: Path, name: str, experts: str | None, beside: int) -> None:
    """Fail where prompts in lockstep get other tokens than alone, or a pass brings an expert more than once.

    The budget is ``beside`` bytes more than the smallest that works.
    """
    plain = saved(tmp_path, name, experts)
    whole = sum(tensor.nbytes for name, tensor in plain.named_parameters() if ".experts." in name)
    wanted = [plain.generate(ids, max_new_tokens=3, do_sample=False) for ids in PROMPTS]
    with opened(tmp_path, least_budget(tmp_path) + beside) as loaded:
        if experts is not None:
            loaded.model.set_experts_implementation(experts)
        offstage.lockstep(loaded.model, [partial(loaded.model, ids) for ids in PROMPTS])
        assert brought(loaded) <= whole
        answers = offstage.lockstep(
            loaded.model,
            [partial(loaded.model.generate, ids, max_new_tokens=3, do_sample=False) for ids in PROMPTS],
        )
        assert all(map(torch.equal, answers, wanted))
        assert brought(loaded) <= 4 * whole, "three more passes"


def test_without_turns_the_check_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(RoutedExperts, "_takes_turns", lambda self, key: False)
    with pytest.raises(AssertionError):
        check(tmp_path, "Mixtral", "grouped_mm", 20_000)
