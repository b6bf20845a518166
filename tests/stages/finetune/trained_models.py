"""Models that are trained with and without offload, and what is compared."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


class Residual(nn.Module):
    """A convolution net in the manner of ResNet: batch norms, additions, activations in place.

    Its blocks run in a context of their own, as ``inner`` makes it.
    """

    inner: Callable[[], AbstractContextManager[object]] = nullcontext

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(8 * 8 * 8, 5)

    @staticmethod
    def block() -> nn.Sequential:
        conv = lambda: nn.Conv2d(8, 8, 3, padding=1, bias=False)  # noqa: E731
        return nn.Sequential(conv(), nn.BatchNorm2d(8), nn.ReLU(inplace=True), conv(), nn.BatchNorm2d(8))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            with self.inner():
                hidden = nn.functional.relu(block(hidden) + hidden, inplace=True)
        return self.head(self.pool(hidden).flatten(1))


def llama(attention: str = "sdpa") -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def llama_loss(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 97, (2, 24), generator=generator)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    assert isinstance(loss, torch.Tensor)
    return loss


def residual() -> nn.Module:
    torch.manual_seed(0)
    return Residual()


def residual_loss(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return nn.functional.cross_entropy(model(torch.randn(4, 3, 16, 16, generator=generator)), torch.arange(4))


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], torch.Tensor]]] = {
    "llama": (llama, llama_loss),
    "residual": (residual, residual_loss),
}


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def net(width: int = 32, depth: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    taken = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    assert taken
    return taken


def expected(inputs: torch.Tensor, width: int = 32) -> list[torch.Tensor]:
    model = net(width)
    model(inputs).square().sum().backward()
    return gradients(model)


INPUTS = torch.arange(64 * 32).view(64, 32) / 2048
