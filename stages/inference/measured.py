"""What the devices really held."""

from __future__ import annotations

import torch

from pipeline.stage import Context
from stages.dispatch.stage import Dispatched


def measured_peaks(context: Context, dispatched: Dispatched) -> dict[str, int]:
    """Return the peaks so far in bytes: of the host's anonymous memory, and of every accelerator in use, by device."""
    peaks = {"cpu": context.host_peak()}
    if torch.cuda.is_available():
        peaks |= {str(i): torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())}
    return peaks | {str(device): peak for device, peak in dispatched.devices.peaks.items()}
