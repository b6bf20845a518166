"""Two hundred exceptions, thrown at random modules, before and inside their forwards."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from offstage.stages.dispatch import cpu_offload, disk_offload, dispatch_model
from tests.stages.dispatch.models_to_offload import waiting

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


class Thrown(Exception):  # noqa: N818
    pass


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=2, max_position_embeddings=32, **sizes)).eval()


def throw_at(module: nn.Module, moment: int) -> Any:
    """Make ``module`` raise before its forward, after it, or in the middle of it; return what undoes that."""

    def throw(*_: Any, **__: Any) -> None:
        raise Thrown

    if moment == 0:
        return module.register_forward_pre_hook(throw).remove
    if moment == 1:
        return module.register_forward_hook(throw).remove
    module.forward = throw
    return lambda: vars(module).pop("forward")


@pytest.mark.parametrize("way", ["cpu", "disk", "mapped"])
@torch.no_grad()
def test_no_exception_leaves_a_weight_onloaded_or_the_model_broken(way: str, tmp_path: Path) -> None:
    model = llama()
    expected = model(TOKENS).logits
    if way == "cpu":
        cpu_offload(model)
    elif way == "disk":
        disk_offload(model, tmp_path)
    else:
        dispatch_model(model, {"": "cpu", "model.layers.1": "disk", "lm_head": "disk"}, offload_dir=tmp_path)
    away, dice = waiting(model), random.Random(7)
    modules = [module for module in model.modules() if not isinstance(module, nn.ModuleList)]
    for _ in range(200):
        undo = throw_at(dice.choice(modules), dice.randrange(3))
        with pytest.raises(Thrown):
            model(TOKENS)
        undo()
        assert waiting(model) == away
    assert torch.equal(model(TOKENS).logits, expected)
