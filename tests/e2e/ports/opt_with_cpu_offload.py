"""All weights of an OPT model wait in a state dict on the host and come in for each call."""

import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from transformers import OPTConfig, OPTForCausalLM

torch.manual_seed(0)
config = OPTConfig(
    vocab_size=96, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16
)
model = OPTForCausalLM(config).eval()
prompt = torch.tensor([[2, 11, 12, 13]])
with torch.no_grad():
    before = model(prompt).logits

cpu_offload(model, execution_device=torch.device("cpu"))
with torch.no_grad():
    offloaded = model(prompt).logits
print(offloaded.sum().item(), torch.equal(offloaded, before))
print(model.generate(prompt, max_new_tokens=5, do_sample=False).tolist())

remove_hook_from_submodules(model)
print({parameter.device.type for parameter in model.parameters()})
with torch.no_grad():
    print(torch.equal(model(prompt).logits, before))
