"""Which modules of a model are a mixture's experts, of which a token uses a few.

They are those that transformers' interface for experts serves: modules whose weights have one row an expert, and whose
forward is told, for each token, the experts that it was routed to and their weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stages.empty_init.skeleton import ExpertsSpec

_MARKS = ("num_experts", "has_gate", "is_transposed", "config")
"""What transformers' decorator and the classes that it is for leave on each of these modules."""
_INDEX_PLACE = 1
"""The place among the arguments of an experts module of what its tokens are routed to, (tokens, choices)."""
_PER_TOKEN_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts", "moe_k")


def is_experts(module: nn.Module) -> bool:
    """Return whether ``module`` computes a mixture's experts by transformers' interface."""
    return all(hasattr(module, mark) for mark in _MARKS) and hasattr(type(module).forward, "__wrapped__")


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
        tensors = tuple(key for key, tensor in direct.items() if tensor.dim() > 1 and tensor.shape[0] == count)
        if count > 1 and tensors and not set(tensors) & set(unsuited):
            yield ExpertsSpec(name, count, routed.get(name) or configured_width(module.config, count), tensors)


def configured_width(config: object, count: int) -> int:
    """Return how many of ``count`` experts a token uses as the model's ``config`` says; all where it doesn't."""
    found = (getattr(config, key, None) for key in _PER_TOKEN_KEYS)
    return next((value for value in found if isinstance(value, int) and 0 < value <= count), count)


@contextmanager
def watch_routing(model: nn.Module, routed: dict[str, int]) -> Iterator[None]:
    """Note in ``routed``, by module, how many experts a token is routed to, while the block runs ``model``."""
    handles = [
        module.register_forward_pre_hook(_noting(name, routed), with_kwargs=True)
        for name, module in model.named_modules()
        if is_experts(module)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _noting(name: str, routed: dict[str, int]) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        routed[name] = max(routed.get(name, 0), int(routing(module, args, kwargs).shape[-1]))

    return note


def routing(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the experts of each token, (tokens, choices), of the arguments of a call of an experts module."""
    if len(args) > _INDEX_PLACE:
        index = args[_INDEX_PLACE]
    else:
        names = list(inspect.signature(module.forward).parameters)
        index = kwargs[names[_INDEX_PLACE]]
    found: torch.Tensor = index
    return found
