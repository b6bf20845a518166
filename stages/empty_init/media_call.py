"""The forward of a prompt with images or audio, with fake tensors: what a model's encoder holds at that shape."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from offstage.stages.empty_init.activation_peaks import weigh_call
from offstage.stages.empty_init.skeleton import Moment

_CHECKS = "TRANSFORMERS_DISABLE_TORCH_CHECK"
"""Switches off checks of transformers that look at values: fake tensors have none."""


def media_moments(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> tuple[tuple[Moment, ...], int]:
    """Return the moments of a forward of ``model``, on meta, over ``inputs`` that can be its peak, and how many
    positions its encoder makes, 0 where it has none. No moments where the model's code refuses fake tensors.
    """
    call = _MediaCall(inputs)
    with _without_checks():
        moments = weigh_call(model, getattr(model, "_no_split_modules", None) or (), call)
    return moments, call.encoded


class _MediaCall:
    """Calls a model as ``generate`` does for its first token."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        self._inputs = inputs
        self.encoded = 0

    def __call__(self, model: nn.Module) -> object:
        # What counts (sizes, places) keeps its values; numbers with a fraction are held as they came, and as cast.
        given = {
            name: torch.zeros(one.shape, dtype=one.dtype) if one.is_floating_point() else one
            for name, one in self._inputs.items()
        }
        cast = {
            name: one.to(getattr(model, "dtype", one.dtype)) if one.is_floating_point() else one
            for name, one in given.items()
        }
        beside: dict[str, Any] = {}
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            beside["decoder_input_ids"] = torch.ones((1, 1), dtype=torch.long)
        output = model(**cast, **beside)
        states = getattr(output, "encoder_last_hidden_state", None)
        self.encoded = 0 if states is None else int(states.shape[1])
        return output


@contextmanager
def _without_checks() -> Iterator[None]:
    before = os.environ.get(_CHECKS)
    os.environ[_CHECKS] = "1"
    try:
        yield
    finally:
        os.environ.pop(_CHECKS)
        if before is not None:
            os.environ[_CHECKS] = before
