"""A head that is tied to the embedding, on disk with it, and tied still after the weights came back."""

import torch
from accelerate import dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.utils import find_tied_parameters, retie_parameters
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=96, tie_word_embeddings=True, **sizes)
source = LlamaForCausalLM(config).eval()
torch.save(source.state_dict(), "model.bin")
prompt = torch.tensor([[3, 4, 5]])
with torch.no_grad():
    expected = source(prompt).logits

with init_empty_weights():
    model = LlamaForCausalLM(config)
model.tie_weights()
print(find_tied_parameters(model))
device_map = {"model.embed_tokens": "disk", "lm_head": "disk", "model.layers": "cpu", "model.norm": "cpu"}
device_map["model.rotary_emb"] = "cpu"
model = load_checkpoint_and_dispatch(model, "model.bin", device_map=device_map, offload_folder="offload").eval()
with torch.no_grad():
    print(torch.equal(model(prompt).logits, expected), expected.sum().item())

dispatch_model(source, {"": "cpu"})
print(find_tied_parameters(source), source.hf_device_map)
with torch.no_grad():
    print(torch.equal(source(prompt).logits, expected))

loose = LlamaForCausalLM(config)
loose.lm_head.weight = torch.nn.Parameter(torch.zeros(96, 16))
print(find_tied_parameters(loose))
retie_parameters(loose, [["model.embed_tokens.weight", "lm_head.weight"]])
print(find_tied_parameters(loose), loose.lm_head.weight.abs().sum().item() > 0)
