"""What a run of a mixture tells of its experts: how often they were found in slots, and what was brought for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests.e2e.conftest import Finished, Replay, records_in
from tests.long_form import in_ci

pytestmark = pytest.mark.long_form
"""What it shows of whole runs, tests of the stages show of these."""

LAYERS, EXPERTS, TOP, WIDTH, TOKENS = 3, 16, 2, 64, 24
ROW = 3 * WIDTH * WIDTH * 4
"""The bytes of an expert."""
CONFIG = Qwen3MoeConfig(
    hidden_size=WIDTH, moe_intermediate_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4, head_dim=16,
    num_key_value_heads=2, vocab_size=96, num_experts=EXPERTS, num_experts_per_tok=TOP, eos_token_id=None,
    bos_token_id=None,
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).save_pretrained(folder)
    return folder


def asked(checkpoint: Path, tokens: int = TOKENS) -> list[str]:
    """Return the arguments of a run whose budget has all but about half of the experts in memory."""
    return [
        f"model.path={checkpoint}", "max_memory.cpu=1700kB", "storage.io=direct", "generate.prompts=[[1,2,3]]",
        f"generate.max_new_tokens={tokens}", "generate.do_sample=false",
    ]  # fmt: skip


def total(record: dict[str, Any], name: str) -> int:
    return sum(use[name] for use in record["experts"].values())


def test_the_record_has_what_each_layer_came_to_and_the_rate_of_decoding(
    checkpoint: Path, offstage_here: Callable[..., Finished]
) -> None:
    done = offstage_here(*asked(checkpoint))
    assert done.code == 0, done.err
    record, metrics = done.record, done.record["metrics"]
    assert list(record["experts"]) == [f"model.layers.{index}.mlp.experts" for index in range(LAYERS)]
    for use in record["experts"].values():
        assert use["streamed_bytes"] == use["misses"] * ROW > 0
        assert TOP * TOKENS <= use["hits"] + use["misses"] <= TOP * (TOKENS + 2)
    names = ("hits", "misses", "evictions")
    assert [metrics[f"expert_{name}"] for name in names] == [total(record, name) for name in names]
    steps = TOKENS - 1
    brought = (1 - metrics["expert_hit_rate"]) * LAYERS * TOP * ROW
    assert metrics["streamed_bytes_per_token"] == pytest.approx(brought, abs=1), "each once, in decoding alone"
    assert metrics["expert_hit_rate"] * LAYERS * TOP * steps == pytest.approx(
        round(metrics["expert_hit_rate"] * LAYERS * TOP * steps)
    )
    (line,) = [line.split() for line in done.out.splitlines() if line.startswith("expert cache hit rate")]
    assert line[4:] == [
        f"{metrics[name] * 100:.1f}" if name else "%"
        for name in ("expert_hit_rate", "", "predicted_expert_hit_rate", "")
    ]


def test_a_model_without_experts_that_wait_tells_nothing_of_any(
    checkpoint: Path, offstage_here: Callable[..., Finished]
) -> None:
    done = offstage_here(f"model.path={checkpoint}", "max_memory.cpu=1GB", "generate.prompts=[[1]]")
    assert done.code == 0, done.err
    assert done.record["experts"] == {}
    assert not [name for name in done.record["metrics"] if "expert" in name]
    assert "expert cache hit rate" not in done.out


@pytest.mark.long_form
def test_what_a_run_found_changes_no_plan_and_nothing_is_done_again(
    checkpoint: Path, offstage_here: Callable[..., Finished], replay: Replay, tmp_path: Path
) -> None:
    first, second = (offstage_here(*asked(checkpoint)) for _ in range(2))
    metrics = first.record["metrics"]
    assert abs(metrics["expert_hit_rate"] - metrics["predicted_expert_hit_rate"]) > 0.05, "else the test proves nothing"
    for done in (first, second):
        assert "The plan assumed uniform routing" in done.out
        assert "with uniform routing" in " ".join(done.out.split())
    assert all(second.cached.values())
    assert second.record["outputs"] == first.record["outputs"]
    code, out, err = replay(next(iter(records_in(tmp_path))).parent)
    assert code == 0, err
    assert "different" not in out


def test_a_rate_of_few_tokens_is_not_kept_and_the_same_run_is_wholly_cached(
    checkpoint: Path, offstage_here: Callable[..., Finished]
) -> None:
    offstage_here(*asked(checkpoint, tokens=8))
    assert all(offstage_here(*asked(checkpoint, tokens=8)).cached.values())


def test_a_batch_size_that_is_open_is_chosen_as_if_no_rate_were_known(
    checkpoint: Path, offstage_here: Callable[..., Finished]
) -> None:
    given = [*asked(checkpoint), "generate.batch_size=auto"]
    first, second = (offstage_here(*given) for _ in range(2))
    assert first.record["metrics"]["batch_size"] == second.record["metrics"]["batch_size"]
    assert all(second.cached.values())


@pytest.mark.parametrize("stage", in_ci("forward", of=["score", "forward"]))
def test_stages_that_do_not_decode_tell_the_rate_of_the_run(
    stage: str, checkpoint: Path, offstage_here: Callable[..., Finished], tmp_path: Path
) -> None:
    given = tmp_path / "in.safetensors"
    save_file({"input_ids": torch.tensor([[1, 2, 3, 4, 5]])}, given)
    work = {
        "score": ["score.texts=[[1,2,3,4,5]]"],
        "forward": [f"forward.inputs={given}", "forward.outputs=[logits]"],
    }[stage]
    done = offstage_here(
        f"model.path={checkpoint}", "max_memory.cpu=1700kB", "storage.io=direct", f"stages={stage}", *work
    )
    assert done.code == 0, done.err
    hits, misses = total(done.record, "hits"), total(done.record, "misses")
    assert misses > 0
    assert done.record["metrics"]["expert_hit_rate"] == hits / (hits + misses)
