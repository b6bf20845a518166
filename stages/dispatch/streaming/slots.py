"""The places in a model where streamed tensors are bound for each use, and where they wait between uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from stages.machine.aligned_memory import HostBlock


@dataclass(frozen=True, slots=True)
class Slot:
    """One streamed tensor: the table of its module that it is bound in, its short name, and what waits there."""

    name: str
    table: dict[str, Any]
    attribute: str
    waiting: torch.Tensor

    def bind(self, tensor: torch.Tensor) -> None:
        """Put ``tensor`` in the place of what waits, as a parameter where that is one."""
        parameter = isinstance(self.waiting, nn.Parameter)
        self.table[self.attribute] = nn.Parameter(tensor, requires_grad=False) if parameter else tensor

    def unbind(self) -> None:
        """Put what waits back."""
        self.table[self.attribute] = self.waiting


def make_slot(model: nn.Module, name: str) -> Slot:
    """Return the slot of the parameter or buffer ``name`` of ``model``."""
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    table: dict[str, Any] = module._parameters if attribute in module._parameters else module._buffers
    return Slot(name, table, attribute, table[attribute])


def settle(slots: Sequence[Slot], host: HostBlock | None) -> tuple[dict[str, Slot], list[HostBlock]]:
    """Have everything that waits in ``slots`` on the host wait in blocks of memory.

    Return the slots as they are then, by name, and the blocks: ``host``, if anything lies there, and one for what lay
    elsewhere, which moves. What was one tensor in two slots stays one.
    """
    waiting = {id(slot.waiting): slot.waiting for slot in slots}
    strays = {key: tensor for key, tensor in waiting.items() if host is None or tensor not in host}
    block = HostBlock([tensor.nbytes for tensor in strays.values()])
    moved = {key: _moved(tensor, block) for key, tensor in strays.items()}
    settled = {slot.name: replace(slot, waiting=moved.get(id(slot.waiting), slot.waiting)) for slot in slots}
    for slot in settled.values():
        slot.unbind()
    blocks = [host] if host is not None and len(strays) < len(waiting) else []
    return settled, blocks + ([block] if strays else [])


def _moved(tensor: torch.Tensor, block: HostBlock) -> torch.Tensor:
    inside = block.hold(tensor.detach())
    return nn.Parameter(inside, requires_grad=False) if isinstance(tensor, nn.Parameter) else inside
