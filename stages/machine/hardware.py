"""What the machine has: its accelerators, and the memory that the host can still give.

Only this module asks the machine. A policy gets budgets, so that the same inputs give the same plan anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offstage.pipeline.environment import has_accelerator_driver
from offstage.pipeline.process_setup import on_one_machine
from offstage.stages.machine.expandable_segments import are_on
from offstage.stages.machine.host_memory import PROCESS_BYTES, Host, host_memory
from offstage.stages.machine.hosts import host_count
from offstage.stages.units import CPU, DeviceId, parse_size

UNNAMED = "simulated"
"""An accelerator that the config lists without a name."""
_STEPS_AN_OCTAVE = 16


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator: ``total_bytes`` of memory, of which ``free_bytes`` are free; simulated ones aren't there.

    ``ledger_bytes``, where a simulated one has them, are the weights that it really takes, whatever the plan goes by.
    ``has_context`` says whether a context of this process is taken from what is free already, and ``process_bytes``
    are what libraries take of it where it computes. ``expands`` says whether segments of torch's allocator expand there
    once weights are placed.
    """

    name: str
    total_bytes: int
    free_bytes: int
    simulated: bool = False
    ledger_bytes: int | None = None
    has_context: bool = True
    process_bytes: int = 0
    expands: bool = False


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine, this one or another: its accelerators, in the order of their ids, and its host memory."""

    accelerators: tuple[Accelerator, ...]
    host: Host

    def free(self, device: DeviceId) -> int:
        """Return the bytes that ``device`` has free, as plans go by them: coarsely where others take of it too."""
        if device == CPU:
            return self.host.available_bytes if self.host.limit else coarse(self.host.available_bytes)
        accelerator = self.accelerators[int(device)]
        return accelerator.free_bytes if accelerator.simulated else coarse(accelerator.free_bytes)

    @property
    def expands(self) -> bool:
        """Whether segments of torch's allocator expand, which is a setting of the process, for all of them."""
        return any(device.expands for device in self.accelerators)

    @property
    def process_bytes(self) -> dict[DeviceId, int]:
        """What the process of a run takes of each device beside weights and request, where it computes there."""
        devices: dict[DeviceId, int] = {CPU: self.host.process_bytes}
        return devices | {index: device.process_bytes for index, device in enumerate(self.accelerators)}


def hardware(config: Mapping[str, Any], *, process_bytes: int = PROCESS_BYTES) -> Hardware:
    """Return the machine that the config's ``hardware`` describes: this one, where ``devices`` is null.

    The process of a run holds ``process_bytes`` by itself. Processes of one run that share this machine's memory each
    have their part of it.
    """
    described = config.get("hardware") or {}
    devices = described.get("devices")
    size = None if described.get("host") is None else parse_size(described["host"]["memory"])
    here = host_memory(process_bytes=process_bytes) if size is None else Host(size, size, limit="hardware.host.memory")
    if size is None and host_count(described) > 1 and (several := on_one_machine()) > 1:
        here = replace(here, available_bytes=here.available_bytes // several)
    return Hardware(local_accelerators() if devices is None else tuple(map(simulated, devices)), here)


def simulated(device: Mapping[str, Any]) -> Accelerator:
    """Return an accelerator that the config lists: ``{memory: 24GB}``.

    It may have a ``name``, and a ``ledger``: to rehearse what happens on one that has less than it says. The
    ``host_to_device`` and the ``rates`` that it may have of its own are read with all others (``read_rates``).
    """
    size, ledger = parse_size(device["memory"]), device.get("ledger")
    capacity = None if ledger is None else parse_size(ledger)
    return Accelerator(
        str(device.get("name") or UNNAMED), size, size, simulated=True, ledger_bytes=capacity, expands=are_on()
    )


def given_names(machine: Hardware) -> dict[DeviceId, str]:
    """Return the names that the config gives to accelerators that it lists, by their ids."""
    listed = enumerate(machine.accelerators)
    return {index: device.name for index, device in listed if device.simulated and device.name != UNNAMED}


def ledgers(machine: Hardware, budgets: Mapping[DeviceId, int | None], *, beside: int = 0) -> dict[DeviceId, int]:
    """Return the bytes that each simulated accelerator takes: of weights its budget, as far as it has the memory.

    ``beside`` are those of activations, where they are counted.
    """
    capacities: dict[DeviceId, int] = {}
    for index, device in enumerate(machine.accelerators):
        room = min((budgets.get(index, 0) or 0) + beside, device.total_bytes)
        if device.simulated:
            capacities[index] = room if device.ledger_bytes is None else device.ledger_bytes
    return capacities


def local_accelerators(root: Path = Path("/")) -> tuple[Accelerator, ...]:
    """Return this machine's accelerators. Torch is asked, and imported, only where a driver's device file is there.

    What is free is asked of the driver's own library where it can be: torch makes a context on each device that it
    asks, which takes hundreds of megabytes of one that nothing may ever be placed on.
    """
    if not has_accelerator_driver(root):
        return ()
    import torch

    accelerators = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        holds = torch.cuda.memory_reserved(index) > 0
        free = None if holds else driver_free_bytes(index)
        free_bytes = torch.cuda.mem_get_info(index)[0] if free is None else free
        accelerators.append(
            Accelerator(about.name, about.total_memory, free_bytes, has_context=free is None, expands=are_on())
        )
    return tuple(accelerators)


def driver_free_bytes(index: int) -> int | None:
    """Return the free bytes of the accelerator ``index`` without making a context there; null where nobody knows.

    NVML counts all devices of a machine, torch those that a process may see, so the device is found by its UUID.
    """
    import pynvml
    import torch

    try:
        pynvml.nvmlInit()
        try:
            device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
            return int(pynvml.nvmlDeviceGetMemoryInfo(device).free)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:  # no driver of NVIDIA's, a part of a device, or a system that doesn't tell
        return None


def coarse(count: int) -> int:
    """Return ``count`` bytes rounded down on a geometric grid of 16 steps an octave (at most 4.3% less).

    Free memory changes from one second to the next. A plan that is made from it twice in a row must be the same
    plan, or no artifact would ever be found again.
    """
    if count < 1:
        return 0
    step = math.floor(math.log2(count) * _STEPS_AN_OCTAVE)
    return min(count, int(2 ** (step / _STEPS_AN_OCTAVE)))


def coarse_step() -> float:
    """Return how many times its coarse count a count of bytes is at the most."""
    return float(2 ** (1 / _STEPS_AN_OCTAVE))
