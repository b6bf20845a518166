"""The host as if behind a link: what is brought there is copied by the thread that read it."""

from __future__ import annotations

import numpy as np
import torch

from offstage.stages.dispatch.transfer.link import Event
from offstage.stages.dispatch.transfer.links import SynchronousLink
from offstage.stages.machine.aligned_memory import TENSOR_ALIGNMENT, private_memory, with_huge_pages


class _TensorMemory:
    """``size`` bytes of private host memory, lent as tensors."""

    alignment = TENSOR_ALIGNMENT

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = with_huge_pages(private_memory(max(size, 1)))

    def lend(self, begin: int, length: int) -> tuple[torch.Tensor, object]:
        """Return the region at ``begin``: a tensor with a storage of its own."""
        region = np.frombuffer(self._memory, np.uint8, length, begin)
        with torch.inference_mode(False):
            return torch.frombuffer(region, dtype=torch.uint8), region


class HostLink(SynchronousLink):
    """A link to the host's own memory."""

    def __init__(self) -> None:
        super().__init__(_TensorMemory)

    def copy(self, source: torch.Tensor, target: torch.Tensor, *, after: Event) -> Event:
        """Copy now, in this thread alone: torch would start threads of its own in each of ours."""
        np.copyto(target.numpy(), source.numpy())
        return None
