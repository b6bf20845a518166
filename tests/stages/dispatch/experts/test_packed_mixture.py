"""A gpt-oss whose experts rest in MXFP4 answers as the one that transformers unpacked in memory, wherever they lie."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import offstage
from offstage.pipeline.errors import CheckpointError
from tests.stages.dispatch.experts.packed_mixture import CONFIG, save_packed_mixture, unpacked_by_transformers

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [0, 0, 2, 7, 1, 8, 2, 8]])
PROMPTS = {"input_ids": TOKENS, "attention_mask": (TOKENS != 0).long()}
EXPERTS = [f"model.layers.{layer}.mlp.experts" for layer in range(CONFIG.num_hidden_layers)]
ACCELERATED = {"max_memory": {0: "1MB", "cpu": "2MB"}, "hardware": {"devices": [{"name": "small", "memory": "90MB"}]}}
TIERS: Mapping[str, dict[str, Any]] = {
    "all in memory": {},
    "all on disk": {"device_map": {"": "disk", "model.embed_tokens": "cpu", "model.norm": "cpu"}},
    "slots for a few experts": {"max_memory": {"cpu": "260KB"}},
    "from disk to an accelerator": {"device_map": {"": 0, **dict.fromkeys(EXPERTS, "disk")}, **ACCELERATED},
    "from the host to an accelerator": {"device_map": {"": 0, **dict.fromkeys(EXPERTS, "cpu")}, **ACCELERATED},
}
ON_DISK = {"device_map": {"": "cpu", **dict.fromkeys(EXPERTS, "disk")}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_packed_mixture(tmp_path_factory.mktemp("gpt-oss"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def answers(model: Any) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [model(**PROMPTS).logits, model.generate(**PROMPTS, max_new_tokens=6, do_sample=False)]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[torch.Tensor]:
    return answers(unpacked_by_transformers(checkpoint))


@pytest.mark.parametrize("tier", TIERS)
def test_it_answers_bit_for_bit_like_the_one_unpacked_in_memory(tier, checkpoint, cache, expected) -> None:
    with offstage.load(checkpoint, cache=cache, max_length=64, batch_size=2, **TIERS[tier]) as loaded:
        logits, tokens = answers(loaded.model)
    assert torch.equal(logits, expected[0])
    assert torch.equal(tokens, expected[1])


def test_it_is_unpacked_to_the_dtype_of_the_run(checkpoint: Path, cache: Path) -> None:
    with offstage.load(checkpoint, cache=cache, max_length=64, dtype="float32", **ON_DISK) as loaded:
        logits, tokens = answers(loaded.model)
    want = answers(unpacked_by_transformers(checkpoint, torch.float32))
    assert torch.equal(logits, want[0])
    assert torch.equal(tokens, want[1])


def test_what_is_streamed_is_what_rests_of_the_experts_that_a_token_is_routed_to(checkpoint, cache) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    stacks = {name: tensor.nbytes for name, tensor in weights.items() if ".experts." in name}
    whole = sum(size for name, size in stacks.items() if name.endswith("down_proj_bias"))  # they are so little
    rest = sum(stacks.values()) - whole
    count = CONFIG.num_hidden_layers * CONFIG.num_local_experts
    with offstage.load(checkpoint, cache=cache, max_length=64, **ON_DISK) as loaded:
        loaded.model(TOKENS[:1, :1])
        streamed = loaded.traffic.streamed_bytes
    assert streamed == whole + rest // count * CONFIG.num_experts_per_tok * CONFIG.num_hidden_layers


STACK = f"{EXPERTS[1]}.down_proj"
BROKEN = {
    "scales of fewer experts": (f"{STACK}_scales", (7, 64, 3), "[7, 64, 3]"),
    "all of fewer experts": (STACK, (7, 64, 3), "is [7, 96, 64] instead of [8, 96, 64]"),
}


@pytest.mark.parametrize(("name", "shape", "said"), BROKEN.values(), ids=BROKEN)
def test_a_stack_that_does_not_fit_is_refused_in_a_line(name, shape, said, tmp_path: Path, cache: Path) -> None:
    weights = load_file(save_packed_mixture(tmp_path) / "model.safetensors")
    for key in (key for key in weights if key.startswith(name) and key.endswith(("_blocks", "_scales"))):
        weights[key] = torch.zeros((*shape, *weights[key].shape[3:]), dtype=torch.uint8)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as refusal:
        offstage.load(tmp_path, cache=cache, max_length=64, **ON_DISK)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert refusal.value.exit_code == 3
