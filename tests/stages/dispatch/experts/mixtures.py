"""Small mixtures of many kinds, with random weights, and the pieces that have their experts wait."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    GraniteMoeConfig,
    Llama4TextConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from offstage.stages.dispatch.dispatch_plan import DispatchPlan, ModulePlan
from offstage.stages.dispatch.experts.attach import RoutedModel, attach_experts, expert_places
from offstage.stages.dispatch.streaming.transport import Transport
from offstage.stages.dispatch.transfer.traffic import Traffic
from offstage.stages.empty_init.describe import describe
from offstage.stages.machine.devices import Devices
from offstage.stages.shard_load.sources import DiskWeights
from offstage.stages.units import DeviceId

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "pad_token_id": 0, "eos_token_id": 1, "num_experts_per_tok": 2,
}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
CONFIGS: Mapping[str, PretrainedConfig] = {
    "Mixtral": MixtralConfig(**SIZES, num_local_experts=8),
    "Qwen2-MoE": Qwen2MoeConfig(
        **SIZES, num_experts=8, moe_intermediate_size=32, shared_expert_intermediate_size=32, decoder_sparse_step=2
    ),
    "Qwen3-MoE": Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=32, head_dim=16),
    "OLMoE": OlmoeConfig(**SIZES, num_experts=8),
    "DeepSeek-V3": DeepseekV3Config(
        **{**SIZES, **LATENT, "num_key_value_heads": 4}, n_routed_experts=8, moe_intermediate_size=32,
        first_k_dense_replace=1, n_group=2, topk_group=1,
    ),
    "gpt-oss": GptOssConfig(**SIZES, num_local_experts=8, head_dim=16),
    "Granite-MoE": GraniteMoeConfig(**SIZES, num_local_experts=8),
    "Llama 4": Llama4TextConfig(
        **{**SIZES, "num_local_experts": 8, "num_experts_per_tok": 1}, head_dim=16, intermediate_size_mlp=64
    ),
}  # fmt: skip


OWN_CODE = {"Llama 4"}
"""These compute their experts by code of their own, and know no other implementation."""


def mixture(name: str, dtype: torch.dtype = torch.bfloat16, *, experts: str = "grouped_mm") -> nn.Module:
    """Return the mixture ``name`` with its experts in memory, computed by transformers' implementation ``experts``."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype).eval()
    if name not in OWN_CODE:
        model.set_experts_implementation(experts)
    return model


@contextmanager
def waiting_experts(
    model: nn.Module,
    slots: int,
    *,
    stored: DiskWeights | None = None,
    computes: DeviceId = 0,
    unpacking: int = 0,
) -> Iterator[tuple[RoutedModel, Traffic]]:
    """Have the experts of ``model`` wait in memory, on a simulated accelerator's other side, behind ``slots``.

    Or as ``stored`` has them, and as another device ``computes`` them; it has room for ``unpacking`` them.
    """
    skeleton = describe(model, rehearsed=False)
    whole = sum(skeleton.by_name[name].bytes for spec in skeleton.experts for name in spec.tensors)
    one = whole // sum(spec.count for spec in skeleton.experts)
    devices, stored = Devices({0: 2 * whole}), stored or DiskWeights({})
    parts = {
        spec.module: ModulePlan(computes, dict.fromkeys(spec.tensors, "experts"), (), spec) for spec in skeleton.experts
    }
    plan = DispatchPlan(computes, parts, {}, (), 0, 0, {}, {computes: slots * one}, unpacking={computes: unpacking})
    places, routed = expert_places(model, plan, stored), RoutedModel()
    with ExitStack() as stack:
        transport = Transport(plan, stored, devices, stack)
        transport.open_unpackers({computes: [place for stacks in places.values() for place in stacks]})
        attach_experts(routed, model, places, transport)
        yield routed, transport.traffic
