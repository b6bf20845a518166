"""Hooks that bring a module's weights from a mapping are put on by hand, layer by layer and over the whole tree."""

import torch
from accelerate.hooks import (
    AlignDevicesHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_submodules,
)
from accelerate.utils import OffloadedWeightsLoader, offload_state_dict
from torch import nn


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2))).eval()


inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
expected = make()(inputs)
offload_state_dict("offload", make().state_dict())
weights = OffloadedWeightsLoader(save_folder="offload")

model = make()
add_hook_to_module(model[0], AlignDevicesHook(execution_device="cpu", offload=True))
print(model[0].weight.device, torch.equal(model(inputs), expected), model[0].weight.device)
remove_hook_from_submodules(model)
print(model[0].weight.device, torch.equal(model(inputs), expected))

model = make()
attach_align_device_hook(model, execution_device=torch.device("cpu"), offload=True, weights_map=weights)
print([parameter.device.type for parameter in model.parameters()], torch.equal(model(inputs), expected))

model = make()
attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=weights, offload_buffers=True)
print([buffer.device.type for buffer in model.buffers()], torch.equal(model(inputs), expected))

model = make()
attach_align_device_hook_on_blocks(
    model,
    execution_device={"0": "cpu", "1": "cpu", "2": "cpu"},
    offload={"0": True, "1": False, "2": True},
    weights_map=weights,
)
print([parameter.device.type for parameter in model.parameters()], torch.equal(model(inputs), expected))

model = make()
attach_execution_device_hook(model, "cpu")
print(torch.equal(model(inputs), expected), [hasattr(module, "_hf_hook") for module in model.modules()])
