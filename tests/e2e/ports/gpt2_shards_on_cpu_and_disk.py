"""A sharded GPT-2 is loaded into an empty model, half of it left on disk, and generates."""

import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(vocab_size=96, n_positions=32, n_embd=16, n_layer=4, n_head=2)
GPT2LMHeadModel(config).save_pretrained("checkpoint", max_shard_size="20kB")

with init_empty_weights():
    model = GPT2LMHeadModel(config)
model.tie_weights()
device_map = {"transformer.wte": "cpu", "transformer.wpe": "cpu", "transformer.ln_f": "cpu", "lm_head": "cpu"}
device_map |= {f"transformer.h.{index}": "cpu" if index < 2 else "disk" for index in range(4)}
model = load_checkpoint_and_dispatch(
    model,
    "checkpoint",
    device_map=device_map,
    no_split_module_classes=["GPT2Block"],
    offload_folder="offload",
).eval()

prompt = torch.tensor([[5, 6, 7, 8]])
with torch.no_grad():
    logits = model(prompt).logits
print(logits.sum().item(), logits.device)
print(model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist())
print(model.hf_device_map)
print(model.transformer.h[3].mlp.c_fc.weight.shape, model.transformer.h[0].mlp.c_fc.weight.device)
