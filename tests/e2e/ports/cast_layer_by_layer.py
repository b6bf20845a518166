"""Weights rest in eight bits and are cast for their layer's call; norms are left alone."""

import torch
from accelerate.big_modeling import attach_layerwise_casting_hooks
from accelerate.hooks import LayerwiseCastingHook, add_hook_to_module, remove_hook_from_submodules
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes)).eval()
attach_layerwise_casting_hooks(
    model, storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32, skip_modules_pattern=["lm_head", "norm"]
)
prompt = torch.tensor([[3, 4, 5]])
with torch.no_grad():
    print(model(prompt).logits.sum().item(), model(prompt).logits.dtype)
print(sorted({(name.split(".")[-2], str(parameter.dtype)) for name, parameter in model.named_parameters()}))
print(model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist())
remove_hook_from_submodules(model)
print(model.model.layers[0].mlp.up_proj.weight.dtype)

layer = torch.nn.Linear(4, 4)
add_hook_to_module(layer, LayerwiseCastingHook(torch.float16, torch.float32, non_blocking=False))
print(layer.weight.dtype, layer(torch.ones(1, 4)).dtype, layer.weight.dtype)
