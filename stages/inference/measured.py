"""What the devices really held."""

from __future__ import annotations

import torch

from offstage.pipeline.memory_monitor import held_bytes
from offstage.pipeline.stage import Context
from offstage.stages.dispatch.stage import Dispatched


def measured_peaks(context: Context, dispatched: Dispatched) -> dict[str, int]:
    """Return the peaks so far in bytes: of the host's anonymous memory, and of every accelerator in use, by device."""
    peaks = {"cpu": context.host_peak()}
    if torch.cuda.is_available():
        peaks |= {str(i): torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())}
    return peaks | {str(device): peak for device, peak in dispatched.devices.peaks.items()}


def held_now(dispatched: Dispatched) -> dict[str, int]:
    """Return what is held at this moment in bytes, by device: as ``measured_peaks``, of a system that tells."""
    host = held_bytes()
    held = {} if host is None else {"cpu": host}
    if torch.cuda.is_available():
        held |= {str(i): torch.cuda.memory_allocated(i) for i in range(torch.cuda.device_count())}
    return held | {str(device): count for device, count in dispatched.devices.held.items()}
