"""Linear layers and embeddings whose weights stay packed: they have the blocks of the checkpoint's file and use these.

Such a weight is a plain tensor of bytes to all that plans, loads and streams: it lies in memory as it rests on disk,
and is counted so. What else knows linear layers, peft and optimizers among it, finds none here and says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn import functional

from offstage.pipeline.errors import ConfigError
from offstage.stages.checkpoints.checkpoint import Checkpoint
from offstage.stages.checkpoints.codecs.loops import LANES
from offstage.stages.checkpoints.codecs.packed_matrices import (
    PackedMatrix,
    as_text,
    can_look_up,
    of_text,
    packed_matrix,
    unpack_rows,
)
from offstage.stages.checkpoints.codecs.products import multiply_packed
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import AtRest, PackedTensor
from offstage.stages.checkpoints.readers import open_reader
from offstage.stages.empty_init.names import name_tensors
from offstage.stages.empty_init.skeleton import Skeleton, parent
from offstage.stages.units import DTYPE_BYTES

KEY = "quantized.products"
"""The key of the config that has weights stay packed."""


Modules = Sequence[tuple[str, nn.Module]]


class Packed(NamedTuple):
    """The ``tensor`` that is called ``source`` in a checkpoint."""

    source: str
    tensor: PackedTensor


class PackedLinear(nn.Module):
    """In the place of ``linear``: its ``weight`` is the first of ``parts``, what the checkpoint's tensor ``source``
    rests in as ``matrix`` says. The others stand beside it, each under the name that ``matrix`` has for it.

    Products are added up in float32, the bias too, and rounded once to the dtype of what is given.
    """

    def __init__(self, linear: nn.Linear, parts: Sequence[nn.Parameter], matrix: PackedMatrix, packed: Packed) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.source, self.kind, self.told = packed.source, packed.tensor.codec.name, as_text(matrix)
        self._parts = tuple("weight" + end for end in ("", *matrix.beside))
        for name, part in zip(self._parts, parts, strict=True):
            self.register_parameter(name, part)
        self.bias = linear.bias
        self.training = linear.training

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return what the linear layer returns."""
        if given.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"{KEY}=fused has no gradients; load the model with {KEY}=exact")
        rows = given.reshape(-1, self.in_features).float().contiguous()
        made = multiply_packed(rows, [getattr(self, name) for name in self._parts], self.told)
        if self.bias is not None:
            made += self.bias
        return made.to(given.dtype).view(*given.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Return what a printed model says of it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.kind}"


class PackedEmbedding(nn.Embedding):
    """In the place of ``embedding``, likewise: the rows that are looked up are unpacked, to the dtype that it has."""

    def __init__(self, embedding: nn.Embedding, weight: nn.Parameter, packed: Packed) -> None:
        count, width = embedding.num_embeddings, embedding.embedding_dim
        super().__init__(count, width, embedding.padding_idx, _weight=embedding.weight, _freeze=True)
        self.source, self.kind, self.dtype = packed.source, packed.tensor.codec.name, embedding.weight.dtype
        self.weight = weight
        self.training = embedding.training

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return what the embedding returns."""
        rows = functional.embedding(input, self.weight)
        return unpack_rows(rows, self.kind, self.dtype)


def keep_packed(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Have each linear layer and embedding of ``model`` stay packed whose weight can be multiplied as it rests.

    Others are loaded as ever: those in formats without products, those tied to what isn't of the two kinds, and those
    whose weights the model's class has in a dtype of its own, which its code looks at.
    """
    entries, named = open_reader(checkpoint).entries, dict(model.named_parameters(remove_duplicate=False))
    users: dict[int, list[str]] = {}
    for name, parameter in named.items():
        users.setdefault(id(parameter), []).append(name)
    own_dtype = of_own_dtype(model)
    for step in name_tensors(model, entries).steps:
        if step.converter is not None or len(step.sources) != 1 or len(step.targets) != 1:
            continue
        (target,), (source,) = step.targets, step.source_names
        entry, tensor = entries[source], named.get(target)
        matrix = packed_matrix(entry) if len(entry.shape) == 2 else None
        if tensor is None or matrix is None or entry.shape != tuple(tensor.shape):
            continue
        assert isinstance(entry, PackedTensor)
        names = users[id(tensor)]
        modules = [(parent(name), model.get_submodule(parent(name))) for name in names]
        fits = all(name.endswith(".weight") and not (own_dtype and own_dtype.search(name)) for name in names)
        kinds = (nn.Linear, nn.Embedding) if can_look_up(matrix) else (nn.Linear,)
        if fits and all(type(module) in kinds for _, module in modules):
            _replace(model, modules, matrix, Packed(source, entry))
    if not any(isinstance(module, PackedLinear) for module in packed_modules(model).values()):
        raise ConfigError(
            f"{KEY}: 'fused' is of no use, no linear layer of {checkpoint.path} rests in a format with products, in "
            f"whole runs of {LANES} columns; take 'exact'"
        )


def _replace(model: nn.Module, modules: Modules, matrix: PackedMatrix, packed: Packed) -> None:
    """Put modules that share one packed weight in the place of ``modules``, which share what it is unpacked to."""
    parts = [_on_meta(part) for part in map(_as_it_lies, packed.tensor.parts)]
    for place, module in modules:
        if isinstance(module, nn.Embedding):
            model.set_submodule(place, PackedEmbedding(module, parts[0], packed))
        elif isinstance(module, nn.Linear):
            model.set_submodule(place, PackedLinear(module, parts, matrix, packed))


def _as_it_lies(part: Extent) -> Extent:
    """Return ``part`` with what is of one byte a number as bytes: no model computes in such dtypes."""
    return replace(part, dtype="uint8") if DTYPE_BYTES[part.dtype] == 1 else part


def _on_meta(part: Extent) -> nn.Parameter:
    return nn.Parameter(torch.empty(part.shape, dtype=torch_dtype(part.dtype), device="meta"), requires_grad=False)


def of_own_dtype(model: nn.Module) -> re.Pattern[str] | None:
    """Return what the names of weights have in them that the class of ``model`` keeps in float32; null for none."""
    known: Any = model
    patterns = {*(getattr(known, "_keep_in_fp32_modules", None) or ())}
    patterns |= {*(getattr(known, "_keep_in_fp32_modules_strict", None) or ())}
    return re.compile("|".join(pattern.replace("*", ".*") for pattern in sorted(patterns))) if patterns else None


def as_they_rest(model: nn.Module, entries: Mapping[str, AtRest]) -> Mapping[str, AtRest]:
    """Return the checkpoint's ``entries``, those that ``model`` keeps packed as the bytes that they are on disk."""
    kept = {module.source: module for module in packed_modules(model).values()}
    found: dict[str, AtRest] = {}
    for name, entry in entries.items():
        if name in kept and isinstance(entry, PackedTensor):
            ends = "", *(of_text(kept[name].told).beside if isinstance(kept[name], PackedLinear) else ())
            parts = map(_as_it_lies, entry.parts)
            found |= {name + end: part for end, part in zip(ends, parts, strict=True)}
        else:
            found[name] = entry
    return found


def packed_modules(model: nn.Module) -> dict[str, PackedLinear | PackedEmbedding]:
    """Return those that ``model`` has, by their names."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, PackedLinear | PackedEmbedding)
    }


def require_rehearsed(model: nn.Module, skeleton: Skeleton) -> None:
    """Refuse a ``model`` whose own code uses a weight that is packed, and not its module."""
    packed = packed_modules(model)
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

    for module in packed_modules(model).values():
        module.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
