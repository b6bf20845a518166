"""Which of a model's weights learn: all that are floating, those of its adapter, or those of an adapter that is new.

A dispatched model is for inference: nothing in it requires gradients, and it is in eval mode. Here what learns is told
to, and the model goes into training mode, as its users know it: dropout drops what the model's config says.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

import torch
from torch import nn

from pipeline.errors import ConfigError, foreign
from stages.dispatch.streaming.waiting_tensor import WaitingTensor
from stages.empty_init.adapted_model import ADAPTER, without_adapter
from stages.empty_init.skeleton import parent
from stages.finetune.sequences import derive
from stages.plan.request.training import LoraOptions

Parameters = dict[str, nn.Parameter]


def train_all(model: nn.Module) -> Parameters:
    """Have every floating parameter of ``model`` learn, and return them by name, tied ones once."""
    return _learning(model, {name: weight for name, weight in model.named_parameters() if weight.is_floating_point()})


def train_adapter(model: nn.Module) -> Parameters:
    """Have the parameters of the adapter of ``model`` learn, and return them by name."""
    added = set(without_adapter(model).added.values())
    return _learning(model, {name: weight for name, weight in model.named_parameters() if name in added})


def _learning(model: nn.Module, chosen: Parameters) -> Parameters:
    for name, weight in chosen.items():
        if isinstance(weight, WaitingTensor) or weight.is_meta:
            raise ConfigError(f"device_map: {name!r} is streamed, and what is streamed can't learn; see finetune.lora")
    model.requires_grad_(False)
    for weight in chosen.values():
        weight.requires_grad_(True)
    model.train()
    return chosen


def add_lora(model: nn.Module, lora: LoraOptions, *, seed: int, devices: Mapping[str, torch.device]) -> None:
    """Put a new adapter into ``model``, made of ``lora``: it changes nothing yet, since one of its factors is zero.

    Its weights are float32, as peft has them, and lie on the one of ``devices`` where the module computes that they are
    added to. Raises ``ConfigError`` where peft finds no place for it.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    config = LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")
    about = f"finetune.lora: {targets!r} names nothing in {type(model).__name__} that an adapter goes to"
    with foreign(ConfigError, about), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a GPT-2's weights are transposed, say, which peft then heeds
        inject_adapter_in_model(config, model, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    for name in without_adapter(model).added.values():
        module, attribute = model.get_submodule(parent(name)), name.rpartition(".")[2]
        device = devices[name.partition(".lora_")[0]]
        weight = torch.zeros(module.get_parameter(attribute).shape, dtype=torch.float32)
        if ".lora_A." in name:
            generator = torch.Generator().manual_seed(derive(seed, "lora", name))
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
        setattr(module, attribute, nn.Parameter(weight.to(device)))
