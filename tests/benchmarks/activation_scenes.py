"""What is trained in the benchmark of activations: a ResNet-50, the reference's own scene, and a small Llama.

The ResNet is transformers' own with random weights; images are 224 x 224. The Llama has 8 layers of width 512 and reads
256 tokens a sequence. The short ones of each are there to see that the benchmark runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from offstage.stages.dispatch.transfer.trace import Trace


@dataclass(frozen=True, slots=True)
class Scene:
    """A model and what one iteration gives it: images (N, 3, H, W), or token ids (N, T)."""

    model: nn.Module
    inputs: torch.Tensor

    def step(self, inputs: torch.Tensor, around: AbstractContextManager[object], trace: Trace) -> None:
        """Do one iteration, its forward pass inside ``around``; gradients are those of this iteration alone.

        The loss is the mean square of what the model says of ``inputs``, which lie where it does.
        """
        self.model.zero_grad(set_to_none=False)
        with around, trace.span("forward", "compute"):
            loss = self.model(inputs).last_hidden_state.float().square().mean()
        with trace.span("backward", "compute"):
            loss.backward()

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of the last iteration, in the order of the parameters."""
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]


def resnet(batch: int, *, side: int = 224, depths: tuple[int, ...] = (3, 4, 6, 3)) -> Scene:
    """Return a ResNet-50 with bottlenecks, that learns from ``batch`` images."""
    from transformers import ResNetConfig, ResNetModel

    torch.manual_seed(0)
    return Scene(ResNetModel(ResNetConfig(depths=depths)).train(), torch.randn(batch, 3, side, side))


def llama(batch: int, *, layers: int = 8, tokens: int = 256) -> Scene:
    """Return a small Llama that learns from ``batch`` sequences."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2000, hidden_size=512, intermediate_size=1408, num_hidden_layers=layers, num_attention_heads=8,
        use_cache=False,
    )  # fmt: skip
    return Scene(LlamaModel(config).train(), torch.randint(2000, (batch, tokens)))


SCENES: Mapping[str, Callable[[int], Scene]] = {
    "resnet50": resnet,
    "llama": llama,
    "short-resnet": lambda batch: resnet(batch, side=32, depths=(1, 1, 1, 1)),
    "short-llama": lambda batch: llama(batch, layers=1, tokens=64),
}
