"""Weights that are multiplied as they rest, in less memory than one of them takes: by blocks of their rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

import offstage
from offstage.pipeline.errors import BudgetError
from tests.long_form import in_ci
from tests.python_api.rates import RATES
from tests.stages.checkpoints.ggufs import make_gguf

pytest.importorskip("gguf")

WORDS = 5003
SIZES = {
    "hidden_size": 256, "intermediate_size": 2304, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": WORDS, "max_position_embeddings": 64, "num_key_value_heads": 2,
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(
        **{**SIZES, "hidden_size": 2304, "num_hidden_layers": 1, "num_key_value_heads": 1}, tie_word_embeddings=True
    ),
}
CASES = [
    ("llama", ("q8_0",), "float32"), ("llama", ("q4_k", "q6_k"), "bfloat16"), ("qwen2", ("q5_k", "q4_0"), "bfloat16"),
]  # fmt: skip


def load(path: Path, budget: int | None, **options: Any) -> Any:
    given = {"max_memory": None if budget is None else {"cpu": budget}, "hardware": {"devices": [], "rates": RATES}}
    products = {"products": "fused"}
    return offstage.load(path, max_length=64, storage={"io": "direct"}, quantized=products, **given, **options)


def answers(loaded: Any) -> list[Any]:
    """Return all logits of two prompts, those of the last positions, and what follows three, alone and together."""
    prompts = torch.randint(2, WORDS, (2, 30), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = [loaded.model(prompts).logits, loaded.model(prompts[:1], logits_to_keep=1).logits]
    tokens = [[5, 66, 100], [9, 2], [700, 5, 4, 3, 2]]
    together = [one.token_ids for one in loaded.generate(tokens, max_new_tokens=5)]
    alone = [loaded.generate([one], max_new_tokens=5)[0].token_ids for one in tokens]
    assert alone == together
    return [*logits, torch.tensor(alone)]


@pytest.mark.parametrize(("name", "kinds", "dtype"), in_ci(CASES[1], of=CASES))
def test_under_a_budget_below_its_head_a_model_has_the_same_bits(
    name: str, kinds: tuple[str, ...], dtype: str, tmp_path: Path
) -> None:
    path = make_gguf(tmp_path / "model.gguf", name, CONFIGS[name], kinds=kinds, tokens=WORDS)
    with load(path, None, dtype=dtype) as loaded:
        expected = answers(loaded)
        head = loaded.model.get_parameter("lm_head.weight").nbytes
        assert not loaded.plan.block_rows
    with pytest.raises(BudgetError) as refusal:
        load(path, 1, dtype=dtype)
    least = int(re.findall(r"the least that works is (\d+) bytes", str(refusal.value))[0])
    assert least < head / 2
    with load(path, least, dtype=dtype) as loaded:
        assert "lm_head.weight" in loaded.plan.block_rows
        assert any("mlp" in weight for weight in loaded.plan.block_rows) == (name == "qwen2")
        assert all(torch.equal(*pair) for pair in zip(answers(loaded), expected, strict=True))
        assert loaded.traffic.overflow_bytes == 0


def test_rows_that_a_file_has_in_another_order_come_whole(tmp_path: Path) -> None:
    path = make_gguf(
        tmp_path / "model.gguf", "llama", LlamaConfig(**SIZES, head_dim=512), kinds=("q8_0",), tokens=WORDS
    )
    with load(path, None, device_map={"": "disk"}) as loaded:
        linear = {name: module.has_own_rows for name, module in loaded.model.named_modules() if "_proj" in name}
    assert {name for name, own in linear.items() if not own} == {name for name in linear if name[-6] in "qk"}
