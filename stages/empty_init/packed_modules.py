"""Linear layers, embeddings and experts whose weights stay packed: they use what the checkpoint's file has.

Such a weight is plain tensors to all that plans, loads and streams: it lies in memory as it rests on disk, and is
counted so. What else knows linear layers, peft and optimizers among it, finds none here and says so.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from offstage.pipeline.errors import ConfigError
from offstage.stages.checkpoints.checkpoint import Checkpoint
from offstage.stages.checkpoints.codecs.loops import LANES
from offstage.stages.checkpoints.codecs.ordered_linear import OrderedLinear, linear_packed
from offstage.stages.checkpoints.codecs.packed_matrices import (
    UPPER,
    PackedMatrix,
    as_text,
    can_look_up,
    halves,
    has_own_rows,
    packed_matrix,
    stacked,
    unpack_rows,
)
from offstage.stages.checkpoints.codecs.products import multiply_packed
from offstage.stages.checkpoints.codecs.scaled_codes import ScaledCodes
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import AtRest, Codec, PackedTensor
from offstage.stages.checkpoints.readers import open_reader
from offstage.stages.empty_init.experts import is_interface
from offstage.stages.empty_init.merges import sources_in_order
from offstage.stages.empty_init.model import kept_in_float32
from offstage.stages.empty_init.names import NamingStep, name_tensors
from offstage.stages.empty_init.skeleton import Skeleton, parent
from offstage.stages.units import DTYPE_BYTES

KEY = "quantized.products"
"""The key of the config that has weights stay packed."""

_HALVES = ("", UPPER)
"""What the names of the halves of a stack end with, where these rest each by itself."""
_Resting: TypeAlias = tuple[str, tuple[str, ...]]
"""A matrix as text, and the parameters that it rests in."""
PackedModule: TypeAlias = "PackedLinear | PackedEmbedding | PackedExperts"


class Arithmetic(NamedTuple):
    """What linear layers are given is rounded to the dtype ``compute`` for a product, if there is one; that of bfloat16
    is made in a processor's ``tiles``, if it is to be.
    """

    compute: torch.dtype | None
    tiles: bool


class Stack(NamedTuple):
    """What a parameter of a module rests in, or half of one: the checkpoint's ``sources``, of one ``codec``, in
    ``parts`` that have one ``matrix``, or one for each expert.

    Of experts that are ``listed`` the sources are these matrices, one after the other.
    """

    matrix: PackedMatrix
    parts: Sequence[nn.Parameter]
    sources: Sequence[str]
    codec: Codec
    listed: bool = False

    @property
    def ends(self) -> tuple[str, ...]:
        """What the names of the parts end with."""
        return ("", *self.matrix.beside)

    @property
    def kept(self) -> dict[str, tuple[str, ...]]:
        """What the parts of each source are called as they rest."""
        return {source: tuple(source + end for end in self.ends) for source in self.sources}

    @property
    def bytes(self) -> int:
        """The bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def transposed(self) -> bool:
        """Whether rows at rest are columns of what is unpacked."""
        return isinstance(self.codec, ScaledCodes) and self.codec.transposed


class PackedLinear(nn.Module):
    """In the place of ``linear``: its ``weight`` is the first part of ``stack``. The others stand beside it, each under
    the name that the matrix has for it.

    What is given is multiplied as ``how`` says. Products are added up in float32, the bias too, and what comes of it is
    rounded to the dtype of what was given.
    """

    def __init__(self, linear: Any, stack: Stack, how: Arithmetic) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kind, self.kept = stack.codec.name, stack.kept
        names = tuple("weight" + end for end in stack.ends)
        self.matrices: Sequence[_Resting] = [(as_text(stack.matrix), names)]
        for name, part in zip(names, stack.parts, strict=True):
            self.register_parameter(name, part)
        self.register_parameter("bias", linear.bias)
        self.how, self.training, self.has_own_rows = how, linear.training, has_own_rows(stack.matrix)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return what the linear layer returns."""
        own, ((matrix_text, names),) = cast("dict[str, torch.Tensor]", self._parameters), self.matrices
        return _multiply(given, [own[name] for name in names], matrix_text, own["bias"], self.how)

    def extra_repr(self) -> str:
        """Return what a printed model says of it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.kind}"


class PackedEmbedding(nn.Embedding):
    """In the place of ``embedding``, likewise: the rows that are looked up are unpacked, to the dtype that it has."""

    def __init__(self, embedding: nn.Embedding, stack: Stack) -> None:
        count, width = embedding.num_embeddings, embedding.embedding_dim
        super().__init__(count, width, embedding.padding_idx, _weight=embedding.weight, _freeze=True)
        self.kind, self.kept, self.dtype = stack.codec.name, stack.kept, embedding.weight.dtype
        (self.weight,) = stack.parts
        self.training = embedding.training

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return what the embedding returns."""
        rows = functional.embedding(input, self.weight)
        return unpack_rows(rows, self.kind, self.dtype)


class PackedExperts(nn.Module):
    """In the place of ``experts``, a module of transformers' interface for these: its ``stacks``, by their attributes,
    rest in parts of one row an expert, each under the attribute's name and what its matrix calls it.

    The halves of a first matrix may rest each by itself: the gate's under the attribute's name, and the other. What is
    ``listed`` in the checkpoint, one by one, is stacked under these names.

    An expert multiplies the tokens that are routed to it as such a linear layer. What comes of them is weighted, and
    added up for each token in float32, in the order of its choices.
    """

    def __init__(self, experts: Any, stacks: Mapping[str, Sequence[Stack]], how: Arithmetic) -> None:
        super().__init__()
        self.num_experts, self.config = experts.num_experts, experts.config
        self.has_gate, self.has_bias, self.is_transposed = experts.has_gate, experts.has_bias, experts.is_transposed
        every = [stack for pieces in stacks.values() for stack in pieces]
        self.kind = max(every, key=lambda stack: stack.bytes).codec.name
        self.kept: dict[str, tuple[str, ...]] = {}
        self.listed: dict[str, str] = {}
        self._parts: dict[str, list[_Resting]] = {}
        for attribute, pieces in stacks.items():
            self._parts[attribute] = [
                self._register(attribute + end, stack, end) for end, stack in zip(_HALVES, pieces, strict=False)
            ]
        self.matrices = [piece for pieces in self._parts.values() for piece in pieces]
        for name, parameter in experts.named_parameters(recurse=False):
            if name not in stacks:
                self.register_parameter(name, parameter)
        self._activate = experts._apply_gate if self.has_gate else experts.act_fn
        self.how, self.training = how, experts.training

    def _register(self, name: str, stack: Stack, half: str) -> _Resting:
        """Take the parts of ``stack`` under ``name``; return its matrix and what they are called."""
        own = tuple(name + end for end in stack.ends)
        for each, part in zip(own, stack.parts, strict=True):
            self.register_parameter(each, part)
        for source, rests in stack.kept.items():
            if stack.listed:
                self.listed |= dict(zip(rests, own, strict=True))
                self.kept[source] = rests
            else:
                self.kept[source] = (*self.kept.get(source, ()), *(source + half + end for end in stack.ends))
        return as_text(stack.matrix), own

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return what the experts return for ``hidden_states`` [tokens, width], each token with its choices of experts
        and their weights, [tokens, choices].
        """
        count, choices = top_k_index.shape
        outputs = hidden_states.new_empty((count * choices, hidden_states.shape[-1]))
        for expert, places in _shares(top_k_index.reshape(-1)):
            if len(places) == 1:  # views take less time than indices
                place, row = places[0], places[0] // choices
                outputs[place : place + 1] = self._of_expert(hidden_states[row : row + 1], expert)
            else:
                rows = torch.tensor(places, device=hidden_states.device)
                outputs[rows] = self._of_expert(hidden_states[rows // choices], expert)
        weighted = outputs.view(count, choices, -1).float() * top_k_weights.float().unsqueeze(-1)
        return reduce(torch.add, weighted.unbind(1)).to(hidden_states.dtype)

    def _of_expert(self, given: torch.Tensor, expert: int) -> torch.Tensor:
        first = "gate_up_proj" if self.has_gate else "up_proj"
        return self._multiply(self._activate(self._multiply(given, first, expert)), "down_proj", expert)

    def _multiply(self, given: torch.Tensor, attribute: str, expert: int) -> torch.Tensor:
        pieces = self._parts[attribute]
        bias = getattr(self, f"{attribute}_bias")[expert] if self.has_bias else None
        added = [None] * len(pieces) if bias is None else bias.chunk(len(pieces))
        made = [
            _multiply(given, [getattr(self, name)[expert] for name in names], matrix_text, own, self.how)
            for (matrix_text, names), own in zip(pieces, added, strict=True)
        ]
        return made[0] if len(made) == 1 else torch.cat(made, -1)


def _shares(index: torch.Tensor) -> list[tuple[int, list[int]]]:
    """Return each expert that is in ``index``, and where; where there are no numbers, one that has all."""
    has_numbers = not (index.is_meta or isinstance(index, FakeTensor))
    shares = defaultdict[int, list[int]](list)
    for place, expert in enumerate(index.tolist() if has_numbers else [0] * len(index)):
        shares[expert].append(place)
    return sorted(shares.items())


def _multiply(
    given: torch.Tensor, parts: Sequence[torch.Tensor], matrix_text: str, bias: torch.Tensor | None, how: Arithmetic
) -> torch.Tensor:
    """Return the products of ``given`` […, columns] with what rests in ``parts``, and the ``bias``."""
    if given.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{KEY}=fused has no gradients; load the model with {KEY}=exact")
    if torch.overrides.has_torch_function(parts):
        return linear_packed(given, parts[0], bias, beside=parts[1:], matrix_text=matrix_text, **how._asdict())
    return multiply_packed(given, parts, matrix_text, bias, compute=how.compute, tiles=how.tiles)


def keep_packed(
    model: nn.Module, checkpoint: Checkpoint, compute_dtype: str | None = None, *, tiles: bool = False
) -> None:
    """Have each linear layer and embedding of ``model`` stay packed whose weight can be multiplied as it rests: what
    linear layers are given, in the ``compute_dtype``, and that of bfloat16 in ``tiles``.

    Others are loaded as ever: those in formats without products, those tied to what isn't of the two kinds, and those
    whose weights the model's class has in a dtype of its own, which its code looks at. In float32 they are multiplied
    in the same order.
    """
    entries, named = open_reader(checkpoint).entries, dict(model.named_parameters(remove_duplicate=False))
    stacks: dict[str, dict[str, Sequence[Stack]]] = defaultdict(dict)
    users: dict[int, list[str]] = {}
    for name, parameter in named.items():
        users.setdefault(id(parameter), []).append(name)
    how = Arithmetic(None if compute_dtype is None else torch_dtype(compute_dtype), tiles)
    own_dtype = kept_in_float32(model)
    for step in name_tensors(model, entries).steps:
        pieces = _stacks_of(step, entries, named)
        if not pieces:
            continue
        (target,) = step.targets
        if named[target].dim() == 3:
            module, _, attribute = target.rpartition(".")
            stacks[module][attribute] = pieces
            continue
        (stack,) = pieces
        names = users[id(named[target])]
        modules = [(parent(name), model.get_submodule(parent(name))) for name in names]
        fits = all(name.endswith(".weight") and not (own_dtype and own_dtype.search(name)) for name in names)
        kinds = (nn.Linear, nn.Embedding) if can_look_up(stack.matrix) else (nn.Linear,)
        if fits and all(type(module) in kinds for _, module in modules):
            for place, used in modules:
                table = used if isinstance(used, nn.Embedding) else None
                packed = PackedEmbedding(table, stack) if table is not None else PackedLinear(used, stack, how)
                model.set_submodule(place, packed)
    for place, stacks_here in stacks.items():
        experts = model.get_submodule(place)
        if is_interface(experts) and _are_all_of(experts, stacks_here):
            model.set_submodule(place, PackedExperts(experts, stacks_here, how))
    for each in model.modules():
        if type(each) is nn.Linear and each.weight.dtype == torch.float32 and each.in_features % LANES == 0:
            each.__class__ = OrderedLinear
    if not any(isinstance(module, PackedLinear | PackedExperts) for module in packed_modules(model).values()):
        raise ConfigError(
            f"{KEY}: 'fused' is of no use, no linear layer of {checkpoint.path} rests in a format with products, in "
            f"whole runs of {LANES} columns; take 'exact'"
        )
    if tiles and torch.bfloat16 not in ({how.compute} if how.compute else {each.dtype for each in named.values()}):
        raise ConfigError(
            f"quantized.tiles: true is of no use, of the linear layers of {checkpoint.path} none multiplies bfloat16; "
            "add quantized.compute_dtype=bfloat16, or take false"
        )


def _stacks_of(step: NamingStep, entries: Mapping[str, AtRest], named: Mapping[str, nn.Parameter]) -> Sequence[Stack]:
    """Return what the one tensor that ``step`` makes is multiplied as, as it rests; nothing where it can't be.

    That is one stack, or its two halves. Matrices of single experts, one after the other, are a stack too.
    """
    sources = sources_in_order(step, entries)
    tensor = named.get(next(iter(step.targets)))
    if tensor is None or len(step.targets) != 1 or not sources:
        return ()
    quantised = [entry for name in sources if isinstance(entry := entries[name], PackedTensor)]
    if len(quantised) < len(sources) or math.prod(tensor.shape) != sum(math.prod(entry.shape) for entry in quantised):
        return ()
    if len(quantised) == 1:
        stacks = [_stack([piece], sources, whole=True) for piece in halves(quantised[0])]
    else:
        stacks = _stacks_of_list(quantised, sources, experts=len(tensor) if tensor.dim() == 3 else 0)
    made = [stack for stack in stacks if stack is not None]
    return made if len(made) == len(stacks) <= len(_HALVES) else ()


def _stacks_of_list(quantised: Sequence[PackedTensor], sources: Sequence[str], *, experts: int) -> list[Stack | None]:
    """Return what the ``quantised`` matrices are for so many ``experts``: one stack where those of an expert are rows
    of one matrix, one below the other, or a stack of the first ones, one of the second ones.
    """
    first, pieces = packed_matrix(quantised[0]), len(quantised) // experts if experts else 0
    if first is None or pieces * experts != len(quantised) or len(quantised[0].shape) != 2:
        return [None]
    if all(packed_matrix(other) == first for other in quantised):
        joined = stacked(first, pieces)
        if joined is not None:
            shapes = [(experts, pieces * rows, *rest) for rows, *rest in (part.shape for part in quantised[0].parts)]
            return [Stack(joined, _on_meta(quantised[0], shapes), sources, quantised[0].codec)]
    return [_stack(quantised[piece::pieces], sources[piece::pieces]) for piece in range(pieces)]


def _stack(quantised: Sequence[PackedTensor], sources: Sequence[str], *, whole: bool = False) -> Stack | None:
    """Return what is ``quantised`` as a stack: the ``whole`` of one, or a matrix for each expert, all of them alike."""
    first, matrix = quantised[0], packed_matrix(quantised[0])
    if matrix is None or any(packed_matrix(other) != matrix for other in quantised[1:]):
        return None
    shapes = [part.shape if whole else (len(quantised), *part.shape) for part in first.parts]
    return Stack(matrix, _on_meta(first, shapes), sources, first.codec, listed=not whole)


def _are_all_of(experts: Any, stacks: Mapping[str, Sequence[Stack]]) -> bool:
    """Return whether ``stacks`` are what ``experts`` multiply by, each as the rows that the matrix has."""
    wanted = {"down_proj", "gate_up_proj" if experts.has_gate else "up_proj"}
    turned = all(stack.transposed == experts.is_transposed for pieces in stacks.values() for stack in pieces)
    return wanted == stacks.keys() and turned and not getattr(experts, "has_post_expert_norm", False)


def _as_it_lies(part: Extent) -> Extent:
    """Return ``part`` with what is of one byte a number as bytes: no model computes in such dtypes."""
    return replace(part, dtype="uint8") if DTYPE_BYTES[part.dtype] == 1 else part


def _on_meta(tensor: PackedTensor, shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
    """Return the parts of ``tensor`` as parameters without data, of these ``shapes``."""
    kinds = [torch_dtype(_as_it_lies(part).dtype) for part in tensor.parts]
    empty = (torch.empty(shape, dtype=kind, device="meta") for shape, kind in zip(shapes, kinds, strict=True))
    return [nn.Parameter(each, requires_grad=False) for each in empty]


def as_they_rest(model: nn.Module, entries: Mapping[str, AtRest]) -> Mapping[str, AtRest]:
    """Return the checkpoint's ``entries``, those that ``model`` keeps packed as the bytes that they are on disk."""
    beside_of = {name: rests for module in packed_modules(model).values() for name, rests in module.kept.items()}
    resting: dict[str, AtRest] = {}
    for name, entry in entries.items():
        if name in beside_of and isinstance(entry, PackedTensor):
            resting |= dict(zip(beside_of[name], map(_as_it_lies, entry.parts), strict=True))
        else:
            resting[name] = entry
    return resting


def packed_modules(model: nn.Module) -> dict[str, PackedModule]:
    """Return those that ``model`` has, by their names."""
    kinds = PackedLinear | PackedEmbedding | PackedExperts
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def require_rehearsed(model: nn.Module, skeleton: Skeleton) -> None:
    """Refuse a ``model`` whose own code uses a weight that is packed, and not its module."""
    packed = packed_modules(model)
    borrowed = next((name for name in packed if name in skeleton.borrowers), None)
    if borrowed is not None:
        raise ConfigError(f"{KEY}: the model's code reads the weight of {borrowed!r} itself; take {KEY}=exact")
    if packed and skeleton.unrehearsed is not None:
        raise ConfigError(
            f"{KEY}: the model's code can't be traced with weights that stay quantised ({skeleton.unrehearsed}); take "
            f"{KEY}=exact"
        )


def refuse_saving(model: nn.Module) -> None:
    """Have ``model`` refuse to be saved where it has packed weights: nothing else could read these."""

    def refuse(*_: object) -> NoReturn:
        raise RuntimeError(f"{KEY}=fused keeps weights quantised, which can't be saved; load it with {KEY}=exact")

    for module in packed_modules(model).values():
        module.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
