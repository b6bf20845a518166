"""What a model would take is estimated before anything is loaded."""

import torch
from accelerate import init_empty_weights, init_on_device
from accelerate.utils import (
    calculate_maximum_sizes,
    compute_module_sizes,
    find_tied_parameters,
    get_max_layer_size,
    named_module_tensors,
)
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

with init_empty_weights():
    model = GPT2LMHeadModel(GPT2Config(n_layer=3))
model.tie_weights()
print({parameter.device.type for parameter in model.parameters()})
total, (largest, names) = calculate_maximum_sizes(model)
print(total, largest, names[0])
for dtype in (torch.float32, torch.float16, torch.int8):
    print(dtype, total * dtype.itemsize // torch.float32.itemsize)
sizes = compute_module_sizes(model, dtype=torch.float16)
print(sizes[""], sizes["transformer.h.0"], sizes["transformer.wte"])
blocks = list(model.transformer.h.named_children())
print(get_max_layer_size(blocks, compute_module_sizes(model.transformer.h), ["GPT2Block"]))
print(find_tied_parameters(model))

with init_empty_weights(include_buffers=True):
    norm = nn.BatchNorm1d(4)
print([(name, tensor.device.type) for name, tensor in named_module_tensors(norm)])
with init_on_device(torch.device("cpu")):
    print(nn.Linear(2, 2).weight.device)
