"""Small models for the tests of hooks, and what those tests ask of a model."""

from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.batchnorm(self.linear1(x)))


class Borrower(nn.Module):
    """Uses its child's tensors without calling the child."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(into, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.linear.weight.t() + self.linear.bias


class Tied(nn.Module):
    """An embedding and a head that are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embed(tokens)))


class Transformer(nn.Module):
    """Torch's own attention, which hands its child's weights to a function instead of calling the child."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


def seeded(kind: Any, *args: Any) -> Any:
    """Return a model of the class ``kind`` with the same weights each time, ready to answer."""
    torch.manual_seed(0)
    return kind(*args).eval()


def waiting(model: nn.Module) -> set[str]:
    """Return the names of the tensors of ``model`` that are on meta."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name for name, tensor in tensors if tensor.is_meta}


def anatomy(model: nn.Module) -> dict[str, Any]:
    """Return all that a module and its submodules are made of: what must be the same after hooks are removed."""
    parts: dict[str, Any] = {}
    for name, module in model.named_modules():
        parts[f"{name}:class"] = type(module)
        for key, value in vars(module).items():
            whole = isinstance(value, dict | set)
            parts[f"{name}:{key}"] = type(value)(value) if whole else value
        for key, tensor in {**module._parameters, **module._buffers}.items():
            parts[f"{name}:{key}:attributes"] = None if tensor is None else dict(vars(tensor))
    return parts


def same_anatomy(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two anatomies are the same, object by object."""

    def same(left: Any, right: Any) -> bool:
        if isinstance(left, dict) and isinstance(right, dict):
            return left.keys() == right.keys() and all(left[key] is right[key] for key in left)
        return left is right or (not isinstance(left, torch.Tensor) and bool(left == right))

    return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
