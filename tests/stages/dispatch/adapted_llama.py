"""A small Llama with adapters, for tests of training: plain in memory, or with its own weights streamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from offstage.stages.units import DeviceId
from tests.stages.dispatch.placed_models import Setup

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
LAYERS = 3


class LowRank(nn.Module):
    """A linear layer that stays as it is, and two small ones beside it that learn."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted_llama(checkpointing: str | None = None) -> Any:
    """Return the model, only its adapters learning; ``checkpointing`` is ``reentrant`` or ``other``."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = LlamaForCausalLM(
        LlamaConfig(vocab_size=128, num_hidden_layers=LAYERS, **sizes, tie_word_embeddings=False)
    )
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.mlp.down_proj = LowRank(layer.mlp.down_proj)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    return model.train().requires_grad_(False)


def learning(model: nn.Module) -> list[nn.Parameter]:
    """Have the adapters learn, and return their weights."""
    parameters = [p for name, p in model.named_parameters() if ".up." in name or ".down." in name]
    for parameter in parameters:
        parameter.requires_grad_(True)
    return parameters


def trained(model: Any, steps: int, step: Callable[[Any], torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Train the adapters of ``model``; return the losses, the gradients of the last step, and the weights."""
    parameters = learning(model)
    optimiser, losses = torch.optim.AdamW(parameters, lr=0.01), []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = step(model) if step is not None else model(TOKENS, labels=TOKENS).loss
        loss.backward()
        losses.append(loss.detach())
        optimiser.step()
    gradients = [parameter.grad for parameter in parameters]
    assert all(gradient is not None for gradient in gradients)
    return [*losses, *(gradient for gradient in gradients if gradient is not None), *(p.detach() for p in parameters)]


def lies(where: str) -> Callable[[str], DeviceId]:
    """Return where each tensor lies: adapters and norms where they compute, the others as ``where`` says."""

    def home(name: str) -> DeviceId:
        computes = computing(name) if where == "accelerators" else "cpu"
        if not name.endswith("weight") or "norm" in name or ".up." in name or ".down." in name:
            return "cpu" if name.endswith("inv_freq") else computes
        return ("disk" if "mlp" in name else "cpu") if where == "accelerators" else "disk"

    return home


def computing(name: str) -> DeviceId:
    """Return which of two accelerators computes the module ``name``, or the tensor."""
    return int("layers.2" in name or "lm_head" in name or "model.norm" in name)


def on_stage(model: nn.Module, where: str, folder: Path, *, staging_bytes: int = 0, **options: Any) -> Setup:
    """Stream ``model`` from disk to the host, or from the host and disk to two simulated ``accelerators``."""
    apart = where == "accelerators"
    execution = computing if apart else lambda _name: "cpu"
    return Setup(
        model, lies(where), folder, example=TOKENS, execution=execution, staging_bytes=staging_bytes, **options
    )


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Return whether both are the same, bit for bit."""
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
