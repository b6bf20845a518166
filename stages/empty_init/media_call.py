"""The forward of a prompt with images or audio, with fake tensors: what a model's encoder holds at that shape."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from offstage.stages.empty_init.activation_peaks import Weighed, weigh_call
from offstage.stages.empty_init.kept_caches import encoded_positions

_CHECKS = "TRANSFORMERS_DISABLE_TORCH_CHECK"
"""Switches off checks of transformers that look at values: fake tensors have none."""


def weigh_media(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> tuple[Weighed, int]:
    """Return what a forward of ``model``, on meta, over ``inputs`` of one sequence holds and leaves, and how many
    positions its encoder makes, 0 where it has none. Nothing where the model's code refuses fake tensors.
    """
    call, positions = _MediaCall(inputs), inputs["input_ids"].shape[-1] if "input_ids" in inputs else 1
    with _without_checks():
        weighed = weigh_call(model, getattr(model, "_no_split_modules", None) or (), call, positions=positions)
    return weighed, call.encoded


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
        self.encoded = encoded_positions(output)
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
