"""The memory of the accelerators that are here, as their allocators tell it."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


class AcceleratorMemory:
    """The bytes allocated on all accelerators together; asking for their allocators' peaks sets those back."""

    @property
    def live(self) -> int:
        """The bytes allocated now."""
        return sum(torch.accelerator.memory_allocated(index) for index in accelerators())

    def take_peak(self) -> int:
        """Return the most bytes allocated since this was last asked."""
        peak = sum(torch.accelerator.max_memory_allocated(index) for index in accelerators())
        for index in accelerators():
            torch.accelerator.reset_peak_memory_stats(index)
        return peak


def accelerators() -> range:
    """Return the indices of the accelerators that are here."""
    return range(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)


def wait_for_accelerators() -> None:
    """Return when all that was asked of them is done."""
    for index in accelerators():
        torch.accelerator.synchronize(index)


def same_random_numbers() -> AbstractContextManager[None]:
    """Have the random numbers after the block go on as if there had been none in it, on every device."""
    kind = torch.accelerator.current_accelerator()
    return torch.random.fork_rng(accelerators(), device_type="cuda" if kind is None else kind.type)
