"""Maps and loads that can't be carried out raise; the model is as it was."""

import torch
from accelerate import dispatch_model, load_checkpoint_and_dispatch
from accelerate.utils import check_device_map, set_module_tensor_to_device
from torch import nn


def refused(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except ValueError:
        return True
    return False


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
inputs = torch.ones(2, 3)
expected = model(inputs)
torch.save(model.state_dict(), "model.bin")
print(refused(check_device_map, model, {"0": "cpu", "2": "cpu"}), refused(check_device_map, model, {"": "cpu"}))
print(refused(dispatch_model, model, {"0": "cpu", "1": "cpu", "2": "disk"}))
print(refused(dispatch_model, model, {"0": "cpu"}))
print(refused(load_checkpoint_and_dispatch, model, "model.bin", device_map={"0": "cpu"}))
print(refused(load_checkpoint_and_dispatch, model, "model.bin", device_map="sideways"))
print(refused(load_checkpoint_and_dispatch, model, "model.bin", device_map={"": "disk"}))
print(refused(load_checkpoint_and_dispatch, model, "nowhere"))
print(refused(set_module_tensor_to_device, model, "0.weight", "cpu", value=torch.ones(2)))
print(refused(set_module_tensor_to_device, model, "0.nothing", "cpu"))
print(torch.equal(model(inputs), expected))
