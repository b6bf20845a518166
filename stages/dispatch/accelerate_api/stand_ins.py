"""Tensors that are bound in a module in the place of others for a while: for a call, or inside a context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offstage.stages.dispatch.accelerate_api.hooks import ModelHook

Table = dict[str, Any]
"""The parameters or the buffers of a module, by their names in it."""


def bound_tensors(module: nn.Module) -> Iterator[tuple[Table, str]]:
    """Yield where each parameter and each buffer of ``module`` itself is bound: its table, and its name there."""
    tables: tuple[Table, Table] = (module._parameters, module._buffers)
    yield from [(table, name) for table in tables for name, value in table.items() if value is not None]


@dataclass(frozen=True, slots=True)
class StandIn:
    """The ``tensor`` that is bound as ``name`` in the ``table`` of its module, in the place of ``before``."""

    table: Table
    name: str
    before: torch.Tensor
    tensor: torch.Tensor

    def leave(self) -> bool:
        """Put the other one back, unless somebody has bound something else meanwhile; return whether it was there."""
        is_bound = self.table.get(self.name) is self.tensor
        if is_bound:
            self.table[self.name] = self.before
        return is_bound


def stand_in(table: Table, name: str, tensor: torch.Tensor) -> StandIn:
    """Bind ``tensor`` in the place of what is there."""
    found = StandIn(table, name, table[name], tensor)
    table[name] = tensor
    return found


class StandInHook(ModelHook):
    """Binds stand-ins, which its ``pre_forward`` makes, for each call alone."""

    def __init__(self) -> None:
        self.stand_ins: list[StandIn] = []

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Bind the module's own tensors again."""
        self.forward_failed(module)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Bind the module's own tensors again."""
        for each in self.stand_ins:
            each.leave()
        self.stand_ins.clear()
