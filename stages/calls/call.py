"""Calling a model's forward: for real, and with fake tensors, which shows what the real one will hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from offstage.stages.calls.arguments import ForwardCall, Tensors, calls
from offstage.stages.calls.options import ForwardOptions, count_rows
from offstage.stages.calls.results import call_options, names_asked, select
from offstage.stages.calls.signature import fitted


def answer(
    model: nn.Module, call: ForwardCall, given: ForwardOptions, *, device: torch.device | None = None
) -> Tensors:
    """Return what is kept of ``call``, by name, where it was computed. The arguments are brought to ``device`` first.

    Raises a ``ConfigError`` where the forward doesn't take the arguments or doesn't return what is asked for, and
    whatever its code raises.
    """
    arguments = fitted(model, call.arguments, made=call.made, key=call.key)
    on_device = {name: value.to(device) if device is not None else value for name, value in arguments.items()}
    with torch.no_grad():
        return select(model, model(**on_device, **call_options(model, given)), on_device, given)


class RehearsedCall:
    """The largest of the calls that ``given`` asks for, with fake tensors of the same shapes."""

    def __init__(self, given: ForwardOptions, model: Mapping[str, Any]) -> None:
        self._given = given
        self._call = next(calls(given, model))
        self._total = count_rows(given) or len(self._call.rows)
        self._kept_bytes = 0

    @property
    def key(self) -> str:
        """Where what is given to the call stands."""
        return self._call.key

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its arguments."""
        return tuple(self._call.arguments)

    @property
    def has_every_layer(self) -> bool:
        """Whether something of each layer is kept: then no layer can stand for another."""
        return bool(names_asked(self._given))

    @property
    def results_bytes(self) -> int:
        """What is kept of all calls together, at most; known once one was rehearsed."""
        return self._kept_bytes * math.ceil(self._total / max(1, len(self._call.rows)))

    def __call__(self, model: nn.Module) -> object:
        """Call ``model``, whose weights are fake."""
        fakes = {name: torch.zeros(one.shape, dtype=one.dtype) for name, one in self._call.arguments.items()}
        outputs = answer(model, replace(self._call, arguments=fakes), self._given)
        self._kept_bytes = sum(tensor.nbytes for tensor in outputs.values())
        return outputs
