"""A weight larger than the budget is multiplied block by block: the plain model's bits, and the least memory falls."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PretrainedConfig, Qwen2Config

import offstage
from offstage.pipeline.errors import BudgetError
from offstage.stages.machine.row_products import measure as is_exact_by_rows
from offstage.stages.shard_load import stored_weights
from tests.long_form import in_ci

pytestmark = pytest.mark.long_form
"""What it shows of whole runs, tests of the stages show of these."""

WORDS = 5003
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": WORDS}
CONFIGS: Mapping[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, intermediate_size=160, num_key_value_heads=2),
    "qwen2, tied": Qwen2Config(**SIZES, intermediate_size=160, num_key_value_heads=2, tie_word_embeddings=True),
    "opt, wide": OPTConfig(**SIZES, ffn_dim=2100, word_embed_proj_dim=64, max_position_embeddings=64),
}


@pytest.fixture(scope="module", autouse=True)
def _exact() -> None:
    if not all(map(is_exact_by_rows, ("float32", "bfloat16"))):
        pytest.skip("this machine's kernels have other bits")


def saved(name: str, dtype: torch.dtype, folder: Path) -> Any:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def load(folder: Path, budget: int, **options: Any) -> Any:
    given = {"max_memory": {"cpu": budget}, "hardware": {"devices": []}, "batch_size": 4, "max_length": 64, **options}
    return offstage.load(folder, storage={"io": "direct"}, cache=folder / "cache", **given)


def least_of(folder: Path) -> int:
    with pytest.raises(BudgetError) as refusal:
        load(folder, 1)
    return int(re.findall(r"the least that works is (\d+) bytes", str(refusal.value))[0])


def answers(model: Any, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows + length)
    prompt = torch.randint(2, WORDS, (rows, length))
    with torch.inference_mode():
        last = model(prompt, logits_to_keep=1).logits
        return model(prompt).logits, last, model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("llama", torch.float32, marks=pytest.mark.long_form),
        ("llama", torch.bfloat16),
        ("qwen2, tied", torch.bfloat16),
        ("opt, wide", torch.float32),
    ],
)
def test_under_a_budget_below_its_head_a_model_has_the_plain_models_bits(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    plain = saved(name, dtype, tmp_path)
    least, head = least_of(tmp_path), WORDS * 64 * dtype.itemsize
    assert least < head / 2
    with load(folder=tmp_path, budget=least) as streamed:
        assert "lm_head.weight" in streamed.plan.block_rows
        for rows, length in ((1, 1), (1, 40), (4, 1), (4, 40)) if name == "llama" else ((4, 9),):
            both = answers(streamed.model, rows, length), answers(plain, rows, length)
            assert all(torch.equal(answer, wanted) for answer, wanted in zip(*both, strict=True)), (rows, length)
        assert streamed.traffic.overflow_bytes == 0


@pytest.mark.parametrize("waits", in_ci("disk", of=["cpu", "disk"]))
def test_blocks_come_to_an_accelerator_from_wherever_the_weight_waits(waits: str, tmp_path: Path) -> None:
    plain = saved("llama", torch.float32, tmp_path)
    head = WORDS * 64 * 4
    resident = sum(parameter.nbytes for parameter in plain.model.parameters())
    limits = {0: resident + head // 2, "cpu": "20MB" if waits == "cpu" else 0}
    options = {"max_memory": limits, "hardware": {"devices": [{"memory": "1GB"}]}}
    with load(tmp_path, 0, **options, device_map={"model": 0, "lm_head": waits}) as streamed:
        assert "lm_head.weight" in streamed.plan.block_rows
        both = answers(streamed.model, 2, 9), answers(plain, 2, 9)
        assert all(torch.equal(answer, wanted) for answer, wanted in zip(*both, strict=True))
        assert streamed.traffic.overflow_bytes == 0


def test_what_is_cast_for_blocks_is_never_whole_in_memory_and_has_the_same_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("llama", torch.float32, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    monkeypatch.setattr(stored_weights, "LARGE_BYTES", 1)
    monkeypatch.setattr(stored_weights, "PIECE_BYTES", 100_000)
    monkeypatch.setattr(stored_weights, "make_tensors", lambda load, tensors, *_, **__: [*map(pytest.fail, tensors)])
    with load(tmp_path, WORDS * 64, dtype="bfloat16") as streamed:
        assert "lm_head.weight" in streamed.plan.block_rows
        both = answers(streamed.model, 2, 9), answers(plain, 2, 9)
        assert all(torch.equal(answer, wanted) for answer, wanted in zip(*both, strict=True))
