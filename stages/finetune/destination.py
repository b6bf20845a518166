"""Where what is saved goes, by the device that it lies on."""

from __future__ import annotations

import functools
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from offstage.stages.finetune.disk_swap import DiskSwap
from offstage.stages.finetune.host_swap import open_host_swap, rooms_on
from offstage.stages.finetune.offload_history import TagHistory
from offstage.stages.finetune.swap import Swap
from offstage.stages.machine.aligned_memory import ALIGNMENT
from offstage.stages.machine.devices import Devices, Ledger
from offstage.stages.units import CPU, DeviceId

_log = logging.getLogger("offstage")


@dataclass(frozen=True, slots=True)
class Destination:
    """What is saved on ``device`` of ``devices``, or on whatever accelerator it lies, goes to ``target``.

    Files lie in ``folder``; null: in the system's for temporary files. The memory and the files belong to ``history``.
    """

    target: str
    folder: Path | None
    devices: Devices
    device: DeviceId
    history: TagHistory

    @property
    def ledger(self) -> Ledger | None:
        """The ledger that counts what stays, if the device is simulated."""
        return self.devices.ledger(self.device)

    def swap(self, where: torch.device) -> Swap | None:
        """Return what puts away the bytes that lie on ``where``; null if nothing would be gained."""
        device: DeviceId = where.index or 0
        if where.type == "cpu":
            device = CPU if self.ledger is None else self.device
        if self.target == "host" and device == CPU:
            say_that_nothing_goes()
            return None
        make = functools.partial(self._open, device)
        return self.history.swap((self.target, where), (self.ledger, self.folder), make)

    def _open(self, device: DeviceId) -> Swap:
        if self.target == "host":
            return open_host_swap(self.devices, device)
        rooms = rooms_on(self.devices, device, alignment=ALIGNMENT)  # as direct reads fill it
        return DiskSwap(self.folder or Path(tempfile.gettempdir()), rooms)


@functools.cache
def say_that_nothing_goes() -> None:
    """Say once that activations of the host can't be offloaded to the host."""
    _log.warning("CPUOffload: activations of a model on the host stay there; target='disk' offloads them")
