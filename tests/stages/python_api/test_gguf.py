"""Models in GGUF files: the same tensors, tokenizers and tokens as transformers gets of them, wherever weights lie."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import offstage
import pytest
import torch
import transformers

from tests.stages.checkpoints.ggufs import make_gguf

pytest.importorskip("gguf")
PROMPT = "On the stern a sail is set."
KINDS = ("q4_k", "q6_k", "q8_0", "q5_k", "q4_0", "q5_0", "f16")
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 320}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 128}),
    "qwen2moe": ("Qwen2MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen3moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 64}),
    "gemma2": ("Gemma2Config", {"head_dim": 64, "query_pre_attn_scalar": 224}),
    "gpt2": ("GPT2Config", {}),
    "bloom": ("BloomConfig", {}),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all tests here keep what was measured of the machine."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def made(folder: Path, architecture: str, **changed: Any) -> Path:
    name, own = CONFIGS[architecture]
    config = getattr(transformers, name)(**{**SMALL, **HEADS, **own, **changed})
    return Path(make_gguf(folder / "model.gguf", architecture, config, kinds=KINDS, tokens=320))


def theirs(path: Path, dtype: Any = "auto") -> Any:
    """Return transformers' own model of the file, in memory and unpacked."""
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_tensor_is_the_one_that_transformers_unpacks(tmp_path: Path, architecture: str) -> None:
    path = made(tmp_path, architecture)
    wanted = theirs(path, torch.bfloat16)
    with offstage.load(path, dtype="bfloat16", max_memory={"cpu": "8GB"}) as loaded:
        assert type(loaded.model).__name__ == type(wanted).__name__
        state = loaded.model.state_dict()
        assert state.keys() == wanted.state_dict().keys()
        for name, tensor in wanted.state_dict().items():
            assert torch.equal(state[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize(
    ("architecture", "tier"),
    [
        ("llama", "cpu"),
        ("llama", "both"),
        ("llama", "disk"),
        ("qwen2", "disk"),
        ("qwen3moe", "both"),
        ("qwen3moe", "disk"),
    ],
)
def test_the_tokens_are_those_of_the_model_that_transformers_unpacks(
    tmp_path: Path, architecture: str, tier: str
) -> None:
    path = made(tmp_path, architecture)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    asked = tokenizer(PROMPT, return_tensors="pt")
    wanted = theirs(path).generate(**asked, max_new_tokens=8, do_sample=False)
    device_map = {"cpu": {"": "cpu"}, "disk": {"": "disk"}}.get(tier, "sequential")
    with offstage.load(path, max_memory={"cpu": "12MB" if tier == "both" else "1GB"}, device_map=device_map) as loaded:
        again = loaded.tokenizer(PROMPT, return_tensors="pt")
        assert torch.equal(again.input_ids, asked.input_ids)
        assert {tensor.dtype for tensor in loaded.model.state_dict().values()} == {torch.float32}
        got = loaded.model.generate(**again, max_new_tokens=8, do_sample=False)
    assert torch.equal(got, wanted)
