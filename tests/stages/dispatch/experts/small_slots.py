"""Slots of experts of a byte or two, for tests of which expert lies where."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offstage.stages.dispatch.experts.expert_slots import Bank, ExpertSlots
from offstage.stages.dispatch.experts.slot_memory import ExpertLayer, RowShape, slot_rows
from offstage.stages.dispatch.transfer.links import HostLink
from offstage.stages.dispatch.transfer.mover import Mover
from offstage.stages.dispatch.transfer.traffic import Traffic


def small_slots(
    bounds: Sequence[tuple[int, int]], *, layers: int, experts: int, pieces: Sequence[str] = ("weight",)
) -> ExpertSlots:
    """Return slots in banks of these ``bounds``, dealt to so many ``layers`` of so many ``experts``."""
    link, traffic = HostLink(), Traffic()
    shape = RowShape((1,), torch.uint8)
    banks = [Bank(rows) for rows in slot_rows(tuple((piece, shape) for piece in pieces), bounds, link, room=2**20)]
    made = [
        ExpertLayer(
            layer,
            f"layers.{layer}",
            {piece: [torch.tensor([expert], dtype=torch.uint8) for expert in range(experts)] for piece in pieces},
        )
        for layer in range(layers)
    ]
    return ExpertSlots(
        made,
        {layer: banks[layer % len(banks)] for layer in range(layers)},
        Mover(link, (), traffic=traffic),
    )
