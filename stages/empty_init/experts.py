"""Which modules of a model are a mixture's experts, of which a token uses a few.

They have weights of one row an expert. Most are those that transformers' interface for experts serves, whose forward is
told, for each token, the experts that it was routed to and their weights. Some models' own code computes them: it is
told the same (Step 3.7), or multiplies every expert by a row for each token, which is zero where the token isn't routed
to the expert (Llama 4).

Others are a list of modules, of which a forward calls those that its data choose. Where a rehearsal had to decide what
data decide (see ``deciding``), the lists that it didn't call whole are such. Where there was none, a list is taken for
one by its looks: modules all alike, inside a block that is repeated itself, beside a matrix with a row or a column for
each of them: the router. A decoder's layers are a list too, and a forward calls them all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from offstage.stages.empty_init.module_usage import watch_calls
from offstage.stages.empty_init.skeleton import ExpertsSpec, parent, upward

_MARKS = ("num_experts", "has_gate", "is_transposed", "config")
"""What transformers' decorator and the classes that it is for leave on each of these modules."""
_INDEX_PLACE = 1
"""The place among the arguments of an experts module of what its tokens are routed to, (tokens, choices)."""
_INDEX_NAME = "top_k_index"
"""The name that transformers' models give to that argument."""
_LITTLE = 1 / 32
"""What is at most such a part of what a token uses of a layer's experts isn't brought for each of them, which takes as
long as for what is large: a bias, the scales of blocks. All experts' is a weight like others."""
_PER_TOKEN_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts", "moe_k")


def is_experts(module: nn.Module) -> bool:
    """Return whether ``module`` computes a mixture's experts, by transformers' interface or by code of its own."""
    return is_interface(module) or (_holds_stacks_alone(module) and (_is_told(module) or _multiplies_all(module)))


def is_interface(module: Any) -> bool:
    """Return whether ``module`` is what transformers' interface for experts serves, or stands in the place of such."""
    marked = all(hasattr(module, mark) for mark in _MARKS)
    return marked and (hasattr(type(module).forward, "__wrapped__") or _is_told(module))


def _holds_stacks_alone(module: nn.Module) -> bool:
    """Return whether the weights of ``module`` are stacks of matrices, one for each of its experts."""
    weights = dict(module.named_parameters())
    return bool(weights) and all(
        "." not in name and weight.dim() == 3 and weight.shape[0] == getattr(module, "num_experts", None)
        for name, weight in weights.items()
    )


def _is_told(module: nn.Module) -> bool:
    return _INDEX_NAME in _arguments(module)


def _multiplies_all(module: nn.Module) -> bool:
    """Return whether the forward of ``module`` is given rows for all experts, and multiplies them by batches."""
    code = getattr(type(module).forward, "__code__", None)
    return len(_arguments(module)) == 1 and "bmm" in getattr(code, "co_names", ())


def _arguments(module: nn.Module) -> tuple[str, ...]:
    """Return the names of what the forward of ``module`` is given, itself left out."""
    if "forward" in vars(module):
        return tuple(inspect.signature(module.forward).parameters)
    return _parameters(type(module).forward)


@lru_cache(maxsize=64)
def _parameters(forward: Callable[..., object]) -> tuple[str, ...]:
    """Return the same of a class's ``forward``; each call of experts asks for it."""
    return tuple(inspect.signature(forward).parameters)[1:]


def describe_experts(
    model: nn.Module, *, routed: Mapping[str, int], unsuited: Collection[str]
) -> Iterator[ExpertsSpec]:
    """Yield the experts of ``model`` that can be brought one by one.

    ``routed`` has the number of experts a token, by module, where a rehearsal saw it; else the config says it. Modules
    with a tensor in ``unsuited`` (one that is tied, or read or changed by other code) are left out.
    """
    for name, module in model.named_modules():
        if not is_experts(module):
            continue
        count = int(module.num_experts)
        direct = {f"{name}.{key}": tensor for key, tensor in module._parameters.items() if tensor is not None}
        stacks = {key: tensor for key, tensor in direct.items() if tensor.dim() > 1 and tensor.shape[0] == count}
        if count > 1 and stacks and not stacks.keys() & set(unsuited):
            configs = (getattr(model.get_submodule(above), "config", None) for above in upward(name))
            nearest = next((config for config in configs if config is not None), None)
            per_token = routed.get(name) or configured_width(nearest, count)
            used = sum(tensor.nbytes for tensor in stacks.values()) * per_token / count
            tensors = tuple(key for key, tensor in stacks.items() if tensor.nbytes > _LITTLE * used)
            yield ExpertsSpec(name, count, per_token, tensors)


def configured_width(config: object, count: int) -> int:
    """Return how many of ``count`` experts a token uses as the model's ``config`` says; all where it doesn't."""
    values = (getattr(config, key, None) for key in _PER_TOKEN_KEYS)
    return next((value for value in values if isinstance(value, int) and 0 < value <= count), count)


def watch_routing(model: nn.Module, routed: dict[str, int]) -> AbstractContextManager[None]:
    """Note in ``routed``, by module, how many experts a token is routed to, while the block runs ``model``."""
    watched = {name: module for name, module in model.named_modules() if is_experts(module)}

    def note(name: str, given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        index = routing(watched[name], *given)
        if index is not None:
            routed[name] = max(routed.get(name, 0), int(index.shape[-1]))

    return watch_calls(watched.items(), note, lambda _: None)


def routing(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the experts of each token, (tokens, choices), of the arguments of a call of an experts module.

    Null where the module isn't told: its tokens are routed to the experts whose rows aren't zero.
    """
    names = _arguments(module)
    if len(names) == 1:
        return None
    indices: torch.Tensor = args[_INDEX_PLACE] if len(args) > _INDEX_PLACE else kwargs[names[_INDEX_PLACE]]
    return indices


def find_expert_lists(model: nn.Module, called: Collection[str]) -> dict[str, int]:
    """Return, for each list of ``model`` of which a forward that decided ``called`` some only, how many those are."""
    lists = {name: [f"{name}.{key}" for key, _ in members] for name, members in _lists(model)}
    counts = {name: sum(member in called for member in members) for name, members in lists.items()}
    return {name: count for name, count in counts.items() if 0 < count < len(lists[name])}


def guess_expert_lists(model: nn.Module) -> dict[str, int]:
    """Return the lists of ``model`` that look like routed experts, and how many a token uses, as its config says.

    Where that says nothing, it is taken to use all.
    """
    config = getattr(model, "config", None)
    nested = ((name, members) for name, members in _lists(model) if any(map(str.isdigit, name.split("."))))
    return {
        name: configured_width(config, len(members))
        for name, members in nested
        if _has_router(model.get_submodule(parent(name)), [module for _, module in members])
    }


def _lists(model: nn.Module) -> Iterator[tuple[str, list[tuple[str, nn.Module]]]]:
    """Yield the lists that have two modules with weights or more, all of them alike: their names, and these modules."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            members = [child for child in module.named_children() if any(True for _ in child[1].parameters())]
            looks = {(type(child), *(tensor.shape for tensor in child.parameters())) for _, child in members}
            if len(members) > 1 and len(looks) == 1:
                yield name, members


def _has_router(block: nn.Module, experts: Sequence[nn.Module]) -> bool:
    """Return whether ``block`` has a matrix of a row, or a column, for each of ``experts`` beside them."""
    inside = {id(tensor) for expert in experts for tensor in expert.parameters()}
    beside = (tensor for tensor in block.parameters() if id(tensor) not in inside)
    return any(tensor.dim() == 2 and len(experts) in tensor.shape for tensor in beside)
