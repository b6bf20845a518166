"""The least memory that a refusal names works: the plain model's tokens, and nothing outside what was planned."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    PretrainedConfig,
    RwkvConfig,
    T5Config,
    XLNetConfig,
)

import offstage
from offstage.pipeline.errors import BudgetError
from tests.long_form import in_ci

pytestmark = pytest.mark.long_form
"""What it shows of whole runs, tests of the stages show of these."""

CONFIGS: Mapping[str, PretrainedConfig] = {
    "Llama": LlamaConfig(
        hidden_size=256, intermediate_size=700, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300,
    ),
    "GPT-2": GPT2Config(n_embd=256, n_layer=3, n_head=4, vocab_size=300),
    "T5": T5Config(d_model=256, d_ff=700, num_layers=2, num_heads=4, vocab_size=300, decoder_start_token_id=0),
    "RWKV": RwkvConfig(hidden_size=256, num_hidden_layers=2, vocab_size=300, context_length=64),
    "Mamba": MambaConfig(hidden_size=256, num_hidden_layers=3, vocab_size=300),
}  # fmt: skip
SMALL: Mapping[str, PretrainedConfig] = {
    "Mamba": MambaConfig(hidden_size=48, num_hidden_layers=3, vocab_size=96, state_size=8),
    "XLNet": XLNetConfig(d_model=48, n_layer=2, n_head=4, d_inner=64, vocab_size=96),
}
ALONE = {"Llama", "GPT-2", "T5"}
"""In these each module's weights are there alone; Mamba's mixers and all of RWKV read those of several at once."""

IN_CI = [("Llama", "cpu"), ("T5", 0), ("RWKV", "cpu")]
LONG = [("GPT-2", 0), ("Mamba", "cpu"), ("T5", "cpu"), ("RWKV", 0)]


@pytest.mark.parametrize(("name", "device"), in_ci(*IN_CI, of=[*IN_CI, *LONG]))
def test_the_least_that_works_is_a_part_where_parts_are_alone_and_it_works(
    name: str, device: int | str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    kind = AutoModelForSeq2SeqLM if name == "T5" else AutoModelForCausalLM
    kind.from_config(CONFIGS[name], dtype=torch.float32).save_pretrained(tmp_path / "checkpoint")
    plain = kind.from_pretrained(tmp_path / "checkpoint").eval()
    largest = max(sum(p.nbytes for p in module.parameters(recurse=False)) for module in plain.modules())
    prompt = torch.randint(2, 300, (1, 7))

    def load(budget: int) -> Any:
        hardware = {"devices": [{"memory": "1GB"}]} if device == 0 else {"devices": []}
        return offstage.load(
            tmp_path / "checkpoint", max_memory={device: budget, "cpu": budget}, hardware=hardware,
            storage={"io": "direct"}, batch_size=1, max_length=32, cache=tmp_path / "cache",
        )  # fmt: skip

    with pytest.raises(BudgetError) as refusal:
        load(1)
    least = int(re.findall(r"the least that works is (\d+) bytes", str(refusal.value))[0])
    made = sum(buffer.nbytes for buffer in plain.buffers()) if device == "cpu" else 0  # on the host in any plan
    assert (least == largest + made) == (name in ALONE)
    with pytest.raises(BudgetError):
        load(least - 1)
    with load(least) as streamed:
        answer = streamed.model.generate(prompt, max_new_tokens=4, do_sample=False)
        assert torch.equal(answer, plain.generate(prompt, max_new_tokens=4, do_sample=False))
        assert streamed.traffic.overflow_bytes == 0


@pytest.mark.long_form
@pytest.mark.parametrize("name", in_ci("Mamba", of=["Mamba", "XLNet"]))
def test_what_the_plan_accepts_runs_on_an_accelerator_whatever_the_budget(name: str, tmp_path: Path) -> None:
    """Parts that last in the midst of a reserve leave no room in one piece; XLNet's layers hold their weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(SMALL[name], dtype=torch.float32).save_pretrained(tmp_path / "checkpoint")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").eval().requires_grad_(False)
    prompt = torch.randint(2, 96, (1, 7))
    ran = []
    for budget in range(30_000, 180_000, 15_000):
        try:
            streamed = offstage.load(
                tmp_path / "checkpoint", max_memory={0: budget, "cpu": 0}, hardware={"devices": [{"memory": "1GB"}]},
                storage={"io": "direct"}, batch_size=1, max_length=16, cache=tmp_path / "cache",
            )  # fmt: skip
        except BudgetError:
            assert not ran, "more memory is refused where less is not"
            continue
        with streamed, torch.no_grad():
            assert torch.equal(streamed.model(prompt).logits, plain(prompt).logits)
            assert streamed.traffic.overflow_bytes == 0
        ran.append(budget)
    assert len(ran) >= 4
