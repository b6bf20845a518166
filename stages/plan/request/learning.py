"""Which of a model's weights learn: all that are floating, or those of its adapter.

A model of offstage's is for inference: nothing in it requires gradients, and it is in eval mode. Here it is made one
that trains, for a rehearsal on meta and for the training itself alike.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from offstage.stages.empty_init.adapted_model import add_new_adapter, without_adapter
from offstage.stages.plan.request.training import FinetuneOptions

Parameters = dict[str, nn.Parameter]


def adapt(model: nn.Module, options: FinetuneOptions) -> None:
    """Put into ``model`` what the options ask for: a new adapter, on meta, and checkpointing of its layers."""
    if options.lora is not None:
        add_new_adapter(model, options.lora.settings, key="finetune.lora")
    if options.checkpointing:
        enable: Any = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def choose_learning(model: nn.Module, *, adapter: bool) -> Parameters:
    """Have the floating parameters of ``model`` learn, or only those of its ``adapter``; return them by name.

    Tied ones are there once. The model is in training mode then, so that dropout drops what its config says.
    """
    added = set(without_adapter(model).added.values()) if adapter else set()
    chosen = {
        name: weight
        for name, weight in model.named_parameters()
        if (name in added if adapter else weight.is_floating_point())
    }
    model.requires_grad_(False)
    for weight in chosen.values():
        weight.requires_grad_(True)
    model.train()
    return chosen
