"""What a skeleton knows of a mixture: its experts, where their weights have a row each, how many a token uses."""

import json

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    GraniteMoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Step3p7TextConfig,
    Step3p7TextModel,
)

from offstage.pipeline.decoding import decode
from offstage.stages.empty_init import init_empty_weights
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.skeleton import FILE_NAME, ExpertsSpec, Skeleton
from tests.long_form import in_ci

SIZES = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0, "num_experts_per_tok": 3}  # fmt: skip
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
          "num_key_value_heads": 4}  # fmt: skip
CONFIGS = {
    "Mixtral": MixtralConfig(**SIZES, num_local_experts=6),
    "Qwen2-MoE": Qwen2MoeConfig(**SIZES, num_experts=6, moe_intermediate_size=16, decoder_sparse_step=2),
    "Qwen3-MoE": Qwen3MoeConfig(**SIZES, num_experts=6, moe_intermediate_size=16, head_dim=8),
    "OLMoE": OlmoeConfig(**SIZES, num_experts=6, eos_token_id=1),
    "DeepSeek-V3": DeepseekV3Config(
        **SIZES | LATENT, n_routed_experts=6, moe_intermediate_size=16, first_k_dense_replace=1, n_group=1, topk_group=1
    ),
    "gpt-oss": GptOssConfig(**SIZES, num_local_experts=6, head_dim=8),
    "Granite-MoE": GraniteMoeConfig(**SIZES, num_local_experts=6),
}


def on_meta(config: object) -> nn.Module:
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", in_ci("Mixtral", "Qwen2-MoE", "DeepSeek-V3", "gpt-oss", of=CONFIGS))
def test_experts_are_known_with_their_weights_and_how_many_a_token_uses(name: str) -> None:
    model = on_meta(CONFIGS[name])
    skeleton = describe(model)
    assert skeleton.unrehearsed is None
    assert len(skeleton.experts) == {"Qwen2-MoE": 1, "DeepSeek-V3": 2}.get(name, 3)
    for spec in skeleton.experts:
        names = {f"{spec.module}.{key}" for key, _ in model.get_submodule(spec.module).named_parameters(recurse=False)}
        assert (spec.count, spec.per_token, set(spec.tensors)) == (6, 3, names - {f"{spec.module}.down_proj_bias"})


def test_what_is_little_of_experts_is_brought_with_their_module() -> None:
    """All rows of it are less than a part of what a token uses of the layer; of a wide model biases are."""
    wide = GptOssConfig(**SIZES | {"hidden_size": 256, "intermediate_size": 256}, num_local_experts=6, head_dim=8)
    for spec in describe(on_meta(wide)).experts:
        assert spec.tensors == (f"{spec.module}.gate_up_proj", f"{spec.module}.down_proj")


def test_experts_that_a_models_own_code_computes_are_known_too() -> None:
    step = Step3p7TextConfig(
        **SIZES, n_routed_experts=6, moe_intermediate_size=16, share_expert_dim=16, head_dim=8,
        mlp_layer_types=["dense", "sparse", "sparse"],
    )  # fmt: skip
    llama = Llama4TextConfig(
        **SIZES | {"num_experts_per_tok": 1}, num_local_experts=6, head_dim=8, intermediate_size_mlp=24
    )
    with init_empty_weights():
        models = [Step3p7TextModel(step), AutoModelForCausalLM.from_config(llama)]
    shapes = [{(spec.count, spec.per_token) for spec in describe(model).experts} for model in models]
    assert shapes == [{(6, 3)}, {(6, 1)}]


def test_they_stand_in_the_file(tmp_path) -> None:
    skeleton = describe(on_meta(CONFIGS["gpt-oss"]))
    skeleton.save(tmp_path)
    assert decode(Skeleton, json.loads((tmp_path / FILE_NAME).read_text())).experts == skeleton.experts != ()


def test_without_a_rehearsal_the_config_says_how_many_a_token_uses() -> None:
    (first, *_) = describe(on_meta(CONFIGS["Mixtral"]), rehearsed=False).experts
    assert isinstance(first, ExpertsSpec)
    assert first.per_token == 3


def test_a_dense_model_has_none() -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "num_experts_per_tok"}
    assert describe(on_meta(LlamaConfig(**sizes))).experts == ()


def test_experts_whose_weights_other_code_reads_are_left_out() -> None:
    model = on_meta(CONFIGS["Mixtral"])
    layers = model.model.layers
    layers[0].mlp.experts.gate_up_proj = layers[1].mlp.experts.gate_up_proj

    def peep(module: nn.Module, _args: object) -> None:
        torch.sum(module.mlp.experts.down_proj)

    layers[2].register_forward_pre_hook(peep)
    assert describe(model).experts == ()
