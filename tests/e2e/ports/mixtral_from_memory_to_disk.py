"""A mixture of experts that is in memory is dispatched: its later layers go to disk."""

import torch
from accelerate import dispatch_model
from transformers import MixtralConfig, MixtralForCausalLM

torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=96,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_local_experts=4,
)
model = MixtralForCausalLM(config).eval()
prompt = torch.tensor([[9, 10, 11, 12]])
with torch.no_grad():
    expected = model(prompt).logits
device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
model = dispatch_model(model, device_map, main_device="cpu", offload_dir="offload")
with torch.no_grad():
    logits = model(prompt).logits
print(logits.sum().item(), torch.equal(logits, expected))
print(model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0).tolist())
try:
    model.to("meta")
except RuntimeError:
    print("a model with offloaded weights stays where it is")
