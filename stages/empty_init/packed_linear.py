"""Linear layers whose weights stay packed: they have the blocks of the checkpoint's file and multiply by these.

Such a weight is a plain tensor of bytes to all that plans, loads and streams: it lies in memory as it rests on disk,
and is counted so. What else knows linear layers, peft and optimizers among it, finds none here and says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from offstage.pipeline.errors import ConfigError
from offstage.stages.checkpoints.checkpoint import Checkpoint
from offstage.stages.checkpoints.codecs.gguf import GgufCodec
from offstage.stages.checkpoints.codecs.loops import FORMATS_OF_LOOPS
from offstage.stages.checkpoints.codecs.products import can_multiply, multiply_packed
from offstage.stages.checkpoints.packed import AtRest, PackedTensor
from offstage.stages.checkpoints.readers import open_reader
from offstage.stages.empty_init.names import name_tensors
from offstage.stages.empty_init.skeleton import Skeleton

KEY = "quantized.products"
"""The key of the config that has weights stay packed."""


class PackedLinear(nn.Module):
    """In the place of ``linear``: what its weight, the checkpoint's ``source``, rests in as ``tensor`` is its weight.

    Products are added up in float32, the bias too, and rounded once to the dtype of what is given.
    """

    def __init__(self, linear: nn.Linear, tensor: PackedTensor, source: str) -> None:
        super().__init__()
        codec = tensor.codec
        assert isinstance(codec, GgufCodec)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.source, self.kind, self.swapped = source, codec.name, codec.arrangement.swapped or ()
        packed = torch.empty(tensor.parts[0].shape, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        self.training = linear.training

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return what the linear layer returns."""
        if given.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"{KEY}=fused has no gradients; load the model with {KEY}=exact")
        rows = given.reshape(-1, self.in_features).float().contiguous()
        made = multiply_packed(rows, self.weight, self.kind, self.swapped)
        if self.bias is not None:
            made += self.bias
        return made.to(given.dtype).view(*given.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Return what a printed model says of it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.kind}"


def keep_packed(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Put a ``PackedLinear`` in the place of each linear layer of ``model`` whose weight can be multiplied as it rests.

    Others are loaded as ever: those tied to an embedding, those in formats without products, and those whose weights
    the model's class has in a dtype of its own, which its code looks at.
    """
    entries = open_reader(checkpoint).entries
    owners: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    own_dtype = _of_own_dtype(model)
    for step in name_tensors(model, entries).steps:
        if step.converter is not None or len(step.sources) != 1 or len(step.targets) != 1:
            continue
        (target,), (source,) = step.targets, step.source_names
        place, _, attribute = target.rpartition(".")
        entry, linear = entries[source], model.get_submodule(place)
        fits = attribute == "weight" and type(linear) is nn.Linear and entry.shape == tuple(linear.weight.shape)
        if not fits or not can_multiply(entry) or (own_dtype and own_dtype.search(target)):
            continue
        assert isinstance(linear, nn.Linear)
        assert isinstance(entry, PackedTensor)
        if owners[id(linear.weight)] == 1:
            model.set_submodule(place, PackedLinear(linear, entry, source))
    if not packed_linears(model):
        raise ConfigError(
            f"{KEY}: 'fused' is of no use, no linear layer of {checkpoint.path} rests in "
            f"{', '.join(FORMATS_OF_LOOPS)}; take 'exact'"
        )


def _of_own_dtype(model: nn.Module) -> re.Pattern[str] | None:
    """Return what the names of weights have in them that the class of ``model`` keeps in float32; null for none."""
    known: Any = model
    patterns = {*(getattr(known, "_keep_in_fp32_modules", None) or ())}
    patterns |= {*(getattr(known, "_keep_in_fp32_modules_strict", None) or ())}
    return re.compile("|".join(pattern.replace("*", ".*") for pattern in sorted(patterns))) if patterns else None


def as_they_rest(model: nn.Module, entries: Mapping[str, AtRest]) -> Mapping[str, AtRest]:
    """Return the checkpoint's ``entries``, those that ``model`` keeps packed as the bytes that they are on disk."""
    kept = {module.source for module in packed_linears(model).values()}
    return {
        name: entry.parts[0] if name in kept and isinstance(entry, PackedTensor) else entry
        for name, entry in entries.items()
    }


def packed_linears(model: nn.Module) -> dict[str, PackedLinear]:
    """Return those that ``model`` has, by their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def require_rehearsed(model: nn.Module, skeleton: Skeleton) -> None:
    """Refuse a ``model`` whose own code uses a weight that is packed, and not its linear layer."""
    packed = packed_linears(model)
    borrowed = next((name for name in packed if name in skeleton.borrowers), None)
    if borrowed is not None:
        raise ConfigError(f"{KEY}: the model's code reads the weight of {borrowed!r} itself; take {KEY}=exact")
    if packed and skeleton.unrehearsed is not None:
        raise ConfigError(
            f"{KEY}: the model's code can't be rehearsed with weights that stay packed ({skeleton.unrehearsed}); take "
            f"{KEY}=exact"
        )


def refuse_saving(model: nn.Module) -> None:
    """Have ``model`` refuse to be saved where it has packed weights: nothing else could read these."""

    def refuse(*_: object) -> NoReturn:
        raise RuntimeError(f"{KEY}=fused keeps weights packed, which can't be saved; load the model with {KEY}=exact")

    for module in packed_linears(model).values():
        module.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
