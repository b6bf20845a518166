"""Hooks that change what goes in and what comes out: alone, one after the other, replaced and removed."""

import torch
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module
from torch import nn


class AddToInput(ModelHook):
    def __init__(self, amount):
        self.amount = amount

    def pre_forward(self, module, *args, **kwargs):
        return (args[0] + self.amount, *args[1:]), kwargs


class ScaleOutput(ModelHook):
    def post_forward(self, module, output):
        return output * 2

    def detach_hook(self, module):
        print("detached from", type(module).__name__)
        return module


class WithoutGradients(ModelHook):
    no_grad = True


torch.manual_seed(0)
layer, inputs = nn.Linear(3, 3), torch.ones(1, 3)
print(layer(inputs).tolist())
add_hook_to_module(layer, AddToInput(1))
print(layer(inputs).tolist())
add_hook_to_module(layer, AddToInput(2))
print(layer(inputs).tolist())
add_hook_to_module(layer, ScaleOutput(), append=True)
print(type(layer._hf_hook).__name__, layer(inputs).tolist())
remove_hook_from_module(layer)
print(layer(inputs).tolist(), hasattr(layer, "_hf_hook"))

add_hook_to_module(layer, SequentialHook(AddToInput(1), WithoutGradients()))
print(layer(inputs).tolist())
add_hook_to_module(layer, WithoutGradients())
print(layer(inputs).requires_grad)
remove_hook_from_module(layer, recurse=True)
print(layer(inputs).requires_grad)
