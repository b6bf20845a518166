"""A model that was loaded in a context of its own serves calls outside of it, and ``generate`` compiles none of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.generation.configuration_utils import CompileConfig

import offstage

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
IDS = torch.tensor([[5, 6, 7]])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("device_map", ["cpu", "disk"])
def test_a_model_that_was_loaded_in_inference_mode_is_called_with_gradients(
    device_map: str, checkpoint: Path, tmp_path: Path
) -> None:
    with torch.inference_mode():
        loaded = offstage.load(checkpoint, device_map=device_map, cache=tmp_path)
    with loaded:
        assert not any(tensor.is_inference() for tensor in loaded.model.state_dict().values())
        hidden = torch.zeros(1, 3, SIZES["hidden_size"], requires_grad=True)
        loaded.model.requires_grad_(requires_grad=False)
        loaded.model(inputs_embeds=hidden).logits.sum().backward()
        assert hidden.grad is not None


@pytest.mark.parametrize(("device_map", "compiles"), [("cpu", True), ("disk", False)])
def test_generate_compiles_no_model_whose_weights_come_and_go(
    device_map: str, compiles: bool, checkpoint: Path, tmp_path: Path
) -> None:
    config = GenerationConfig(compile_config=CompileConfig())
    config.compile_config._compile_all_devices = True
    with offstage.load(checkpoint, device_map=device_map, cache=tmp_path) as loaded:
        cache = StaticCache(loaded.model.config, max_cache_len=8)
        asked = ({"cache": cache, "past_key_values": cache}, config)
        assert loaded.model._valid_auto_compile_criteria(*asked) is compiles
        if not compiles:
            tokens = loaded.model.generate(
                IDS, generation_config=config, max_new_tokens=3, cache_implementation="static"
            )
            assert tokens.shape[1] > IDS.shape[1]
