"""An encoder-decoder whose weights are all on disk generates."""

import torch
from accelerate import disk_offload
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
config = T5Config(
    vocab_size=96, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0, pad_token_id=0
)
model = T5ForConditionalGeneration(config).eval()
prompt = torch.tensor([[21, 22, 23, 1]])
expected = model.generate(prompt, max_new_tokens=6, do_sample=False).tolist()

disk_offload(model, "offload", execution_device=torch.device("cpu"))
tokens = model.generate(prompt, max_new_tokens=6, do_sample=False).tolist()
print(tokens, tokens == expected)
with torch.no_grad():
    print(model(input_ids=prompt, decoder_input_ids=prompt).logits.sum().item())
