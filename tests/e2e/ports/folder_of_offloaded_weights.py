"""Weights are written to a folder, read as one mapping with others in memory, and put back into a model."""

import json
from pathlib import Path

import torch
from accelerate.utils import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
    set_module_tensor_to_device,
)
from safetensors.torch import save_file
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
state = model.state_dict()
offload_state_dict("offload", {name: state[name] for name in state if name[0] in "01"})
index = json.loads(Path("offload/index.json").read_text())
print({name: (entry["dtype"], entry["shape"]) for name, entry in sorted(index.items())})
index = offload_weight(torch.arange(3.0, dtype=torch.bfloat16), "extra", "offload", index)
save_offload_index(index, "offload")
print(load_offloaded_weight("offload/extra.dat", index["extra"]))

save_file({"w": state["2.weight"], "b": state["2.bias"]}, "last.safetensors", metadata={"format": "pt"})
index["2.weight"] = {"safetensors_file": "last.safetensors", "weight_name": "w"}
index["2.bias"] = {"safetensors_file": "last.safetensors", "weight_name": "b", "dtype": "float16"}
weights = OffloadedWeightsLoader(state_dict={"0.bias": torch.zeros(4)}, save_folder="offload", index=index)
print(sorted(weights), len(weights), weights["0.bias"].tolist())
print(weights["2.bias"].dtype, PrefixedDataset(weights, "2.")["weight"].sum().item())

fresh = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
del index["extra"], index["2.weight"], index["2.bias"]
stored = OffloadedWeightsLoader(save_folder="offload", index=index)
for name in index:
    set_module_tensor_to_device(fresh, name, "cpu", value=stored[name])
for name in ("weight", "bias"):
    set_module_tensor_to_device(fresh, f"2.{name}", "cpu", value=state[f"2.{name}"])
print(torch.equal(fresh(torch.ones(2, 3)), model(torch.ones(2, 3))))
set_module_tensor_to_device(fresh, "2.weight", "meta")
print(fresh[2].weight.device, fresh[2].weight.requires_grad)
