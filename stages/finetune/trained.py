"""What of a dispatched model learns, ready to be trained."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from offstage.pipeline.errors import ConfigError
from offstage.stages.checkpoints.adapters import is_added
from offstage.stages.dispatch.streaming.waiting_tensor import WaitingTensor
from offstage.stages.empty_init.skeleton import parent
from offstage.stages.finetune.sequences import derive
from offstage.stages.inputs.finetune_options import FinetuneOptions
from offstage.stages.plan.request.training import Parameters, adapt, choose_learning


def prepare(
    model: nn.Module, options: FinetuneOptions, *, adapted: bool, devices: Mapping[str, torch.device]
) -> Parameters:
    """Make ``model`` one that trains, and return what of it learns by name.

    ``adapted`` says that it has an adapter, which learns then. A new one lies, module by module, on the one of
    ``devices`` where the module computes that it is added to.
    """
    adapt(model, options)
    if options.lora is not None:
        _fill(model, seed=options.seed, devices=devices)
    learning = choose_learning(model, adapter=adapted or options.lora is not None)
    for name, weight in learning.items():
        if isinstance(weight, WaitingTensor):
            raise ConfigError(f"device_map: {name!r} is streamed, and what is streamed can't learn; see finetune.lora")
    return learning


def _fill(model: nn.Module, *, seed: int, devices: Mapping[str, torch.device]) -> None:
    """Give the new adapter of ``model`` its weights: it changes nothing yet, since one of its factors is zero.

    The other is drawn as peft draws it.
    """
    for name, empty in list(model.named_parameters()):
        if not is_added(name):
            continue
        weight = torch.zeros(empty.shape, dtype=empty.dtype)
        if ".lora_A." in name:
            generator = torch.Generator().manual_seed(derive(seed, "lora", name))
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
        module, place = model.get_submodule(parent(name)), devices[name.partition(".lora_")[0]]
        setattr(module, name.rpartition(".")[2], nn.Parameter(weight.to(place)))
