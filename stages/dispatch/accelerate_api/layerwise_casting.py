"""Weights that rest in a small dtype and are cast for each call of their layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from offstage.stages.dispatch.accelerate_api.hooks import StandInHook, add_hook_to_module
from offstage.stages.dispatch.streaming.places import TensorPlace, places_in
from offstage.stages.dispatch.streaming.waiting_tensor import WaitingTensor, rebuild

CASTABLE = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
"""The layers that hold most of a model's weights and lose little by the cast."""


class LayerwiseCastingHook(StandInHook):
    """Keeps the floats of a module in ``storage_dtype``, and casts them to ``compute_dtype`` for each call.

    The cast copies are let go after the call, so that nothing is cast back. Weights that are offloaded rest in their
    own dtype: what they take lies elsewhere. Storage of fewer bits than the weights had changes what is computed.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        super().__init__()
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Cast the floats of ``module`` to the storage dtype: the same tensors, with other data."""
        for place in _floats(module):
            if not isinstance(place.before, WaitingTensor):
                place.before.data = place.before.data.to(self.storage_dtype, non_blocking=self.non_blocking)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bind copies in the compute dtype, through which gradients reach the tensors that want them."""
        for place in _floats(module):
            copied = place.before.to(self.compute_dtype, non_blocking=self.non_blocking)
            place.bind(copied if copied.requires_grad else rebuild(place.before, copied))
            self.places.append(place)
        return args, kwargs


def attach_layerwise_casting_hooks(  # the field's signature
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Iterable[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Keep the weights of linear and convolution layers in ``module`` in ``storage_dtype``; they compute in another.

    Modules whose dotted name a pattern (a regular expression, searched for) is found in, those of the classes
    ``skip_modules_classes``, and all that is inside them are left as they are.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    >>> attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32)
    >>> model[0].weight.dtype, model(torch.ones(1, 4)).dtype
    (torch.float8_e4m3fn, torch.float32)
    """
    given = skip_modules_pattern
    patterns = [given] if isinstance(given, str) else list(given or ())
    for layer in _layers(module, "", patterns=patterns, classes=skip_modules_classes or ()):
        add_hook_to_module(layer, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)


def _layers(
    module: nn.Module, name: str, *, patterns: list[str], classes: tuple[type[nn.Module], ...]
) -> Iterator[nn.Module]:
    if isinstance(module, classes) or any(re.search(pattern, name) for pattern in patterns):
        return
    if isinstance(module, CASTABLE):
        yield module
        return
    for child_name, child in module.named_children():
        inner = f"{name}.{child_name}" if name else child_name
        yield from _layers(child, inner, patterns=patterns, classes=classes)


def _floats(module: nn.Module) -> Iterator[TensorPlace]:
    for owner in module.modules():
        yield from (place for place in places_in(owner) if place.before.is_floating_point())
