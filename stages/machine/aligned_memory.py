"""Host memory for weights: private, of an exact size, and laid out as a direct read needs it.

A direct read wants the address that it reads to aligned like the offset that it reads from. A tensor begins anywhere in
its file, so its memory begins as many bytes after an aligned address as the tensor does after an aligned offset: then
the storage's bytes land in the tensor itself, and no buffer stands between.

What a device copies from is registered with it as it is. torch's own pinned memory is rounded up to a power of two and
never given back, which no budget survives.
"""

from __future__ import annotations

import math
import mmap
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 4096
"""What direct reads need of file offsets, lengths and addresses, in bytes: a multiple of any block size in use."""

TENSOR_ALIGNMENT = 64
"""Where a tensor may begin: torch aligns its own that way on the host."""

_SMALL_BYTES = 2**18
"""Smaller tensors come from torch's own allocator: a map each would cost more than it saves."""

_HUGE_PAGE_BYTES = 2 * 2**20


_HERE = nullcontext()


def outside_inference() -> AbstractContextManager[None]:
    """Return a context outside of inference mode: what is made in it is written to by other threads too."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _HERE


def align_down(offset: int) -> int:
    """Return the last aligned offset that isn't beyond ``offset``."""
    return offset // ALIGNMENT * ALIGNMENT


def align_up(offset: int, alignment: int = ALIGNMENT) -> int:
    """Return the first multiple of ``alignment`` that isn't before ``offset``."""
    return -(-offset // alignment) * alignment


def private_memory(size: int) -> mmap.mmap:
    """Return ``size`` bytes of private anonymous memory; Python's default is shared memory, which counts as shmem."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def with_huge_pages(memory: mmap.mmap) -> mmap.mmap:
    """Ask for ``memory`` in huge pages where the system has them, and return it.

    For memory that is used over and over. Weights that are loaded once don't ask, nor do slots that tokens fill: a
    virtual machine whose host takes back free memory has none left in whole huge pages, and there the first touch of
    one costs several times more (2 MiB took 4.8 ms where they were 0.6 in small pages).
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def private_bytes(size: int) -> Bytes:
    """Return an array of ``size`` bytes of private memory, which is given back when its last view is gone."""
    return np.frombuffer(private_memory(max(size, 1)), np.uint8)


def buffer_bytes(size: int) -> Bytes:
    """Return an array of ``size`` bytes for storage to read into or write from, in huge pages as far as whole ones fit.

    A storage device is given a list of pieces, each in one piece in memory. Where each costs it time, as in a virtual
    machine, reads into huge pages are twice as fast: 2 MiB are one piece there, and not 512.
    """
    memory = private_memory(max(size, 1) + _HUGE_PAGE_BYTES)  # what isn't touched takes none
    skipped = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE_PAGE_BYTES
    length = size // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if length and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE, skipped, length)
    return np.frombuffer(memory, np.uint8, max(size, 1), skipped)


def tensor_in(memory: Bytes | mmap.mmap, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor whose bytes lie in ``memory`` from ``begin`` on: a view that keeps the memory alive.

    Its storage is its own, not shared with its neighbours in the memory. A copy where its address isn't aligned.
    """
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    if begin % dtype.itemsize:
        raw = torch.frombuffer(memory, dtype=torch.uint8, count=count * dtype.itemsize, offset=begin)
        return raw.clone().view(dtype).view(shape)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin).view(shape)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous cpu ``tensor`` as writable bytes."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # of one element, a view may have any stride
    return flat.view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True)
class TensorRoom:
    """A new contiguous cpu tensor and the aligned ``memory`` around it; null where that is torch's own."""

    tensor: torch.Tensor
    memory: memoryview | None = None


def room_for(shape: tuple[int, ...], dtype: torch.dtype, *, offset: int = 0) -> TensorRoom:
    """Return memory for a tensor that lies at ``offset`` in its file, not yet written to.

    ``offset`` is a multiple of the dtype's size. The memory lives as long as the tensor. It begins as far from a
    multiple of ``TENSOR_ALIGNMENT`` as the offset is: kernels are chosen by that, and their last bits differ, so a
    tensor has the same ones wherever it lies, and those of one that is mapped.
    """
    length, skipped = math.prod(shape) * dtype.itemsize, offset % ALIGNMENT
    if length < _SMALL_BYTES:
        return TensorRoom(_small_tensor(shape, dtype, offset % TENSOR_ALIGNMENT))
    memory = private_memory(align_up(skipped + length))
    return TensorRoom(tensor_in(memory, skipped, dtype, shape), memoryview(memory))


def _small_tensor(shape: tuple[int, ...], dtype: torch.dtype, skipped: int) -> torch.Tensor:
    """Return a tensor that begins ``skipped`` bytes after a multiple of ``TENSOR_ALIGNMENT``."""
    if not skipped:
        return torch.empty(shape, dtype=dtype)
    memory = np.empty(math.prod(shape) * dtype.itemsize + 2 * TENSOR_ALIGNMENT, np.uint8)
    return tensor_in(memory, -memory.ctypes.data % TENSOR_ALIGNMENT + skipped, dtype, shape)


class HostBlock:
    """The weights that wait on the host for an accelerator, side by side in memory of their own.

    ``memory`` is as large as the tensors of the sizes given, each aligned, and rounded up to whole pages. Tensors are
    views of it: it lives as long as the last of them.
    """

    def __init__(self, tensor_bytes: list[int]) -> None:
        self.memory = private_bytes(align_up(sum(align_up(size, TENSOR_ALIGNMENT) for size in tensor_bytes)))
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor whose place is in the block; beyond its end in memory of the tensor's own."""
        begin, end = self._used, self._used + math.prod(shape) * dtype.itemsize
        if end > self.memory.nbytes:
            return torch.empty(shape, dtype=dtype)
        self._used = align_up(end, TENSOR_ALIGNMENT)
        return tensor_in(self.memory, begin, dtype, shape)

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` if its place is in the block already, else a copy whose place is."""
        return tensor if tensor in self else self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def __contains__(self, tensor: object) -> bool:
        begin = self.memory.ctypes.data
        return isinstance(tensor, torch.Tensor) and begin <= tensor.data_ptr() < begin + self.memory.nbytes
