"""A model whose weights are on disk is saved whole, and loads again."""

import torch
from accelerate import dispatch_model
from accelerate.utils import (
    align_module_device,
    has_offloaded_params,
    load_checkpoint_in_model,
    load_state_dict,
)
from accelerate.utils.modeling import get_state_dict_from_offload, get_state_dict_offloaded_model
from safetensors.torch import save_file
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()
inputs = torch.randn(3, 4)
expected = model(inputs)
dispatch_model(model, {"0": "disk", "1": "cpu", "2": "disk"}, offload_dir="offload")
print([has_offloaded_params(layer) for layer in model])

with align_module_device(model[0]):
    print(model[0].weight.device, model[0].weight.sum().item())
with align_module_device(model[0], execution_device="cpu"):
    print(tuple(model[0].bias.shape), model[0].bias.device)

one = get_state_dict_from_offload(model[2], "2.weight", {"2.weight": "", "2.bias": ""})
print({name: value.sum().item() for name, value in one.items()})
state = get_state_dict_offloaded_model(model)
print(sorted(state), {value.device.type for value in state.values()})
save_file(state, "model.safetensors", metadata={"format": "pt"})
print(sorted(load_state_dict("model.safetensors")) == sorted(state))

fresh = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()
load_checkpoint_in_model(fresh, "model.safetensors")
with torch.no_grad():
    print(torch.equal(fresh(inputs), expected))
