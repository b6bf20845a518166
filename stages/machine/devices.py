"""The devices behind the device ids: the host, accelerators that are here, and accelerators that are simulated.

A simulated accelerator is a ledger of the tensors held on it. Moving a tensor there is a real copy, in host memory,
that the ledger counts; a copy that would go over raises, as a full device would. What lies there computes on the cpu.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Mapping

import torch

from offstage.pipeline.errors import BudgetError, ConfigError
from offstage.stages.machine.aligned_memory import (
    Bytes,
    TensorRoom,
    outside_inference,
    private_bytes,
    room_for,
)
from offstage.stages.machine.caching_allocator import COMPUTING, Block
from offstage.stages.machine.expandable_segments import caching_allocator
from offstage.stages.units import DeviceId, format_bytes, parse_device

AnyDevice = int | str | torch.device
"""A device as the field writes it."""


class Ledger:
    """The bytes of tensors on one simulated accelerator: ``allocated`` now, ``peak`` so far, at most ``capacity``.

    A copy is counted until its storage dies: a view of it keeps it on the device, as it would on a real one. What torch
    would have reserved there for what is counted, ``allocator`` says; it gives as much as it is asked for, of segments
    that expand where it ``expands``.
    """

    def __init__(self, device: DeviceId, capacity: int, *, expands: bool = False) -> None:
        self.device, self.capacity, self.peak = device, capacity, 0
        self.allocator = caching_allocator(expands=expands)
        self._counted: dict[int, Block] = {}  # address → the block of what is counted there
        self._allocated = 0
        # (address, block, bytes) of storages that died: in any thread, and in the middle of any statement
        self._freed: deque[tuple[int, Block, int]] = deque()
        self._lock = threading.RLock()

    @property
    def allocated(self) -> int:
        """The bytes held now."""
        with self._lock:
            while self._freed:
                address, block, count = self._freed.popleft()
                self._allocated -= count
                self.allocator.free(block)
                if self._counted.get(address) is block:  # else something new lies there by now
                    del self._counted[address]
            return self._allocated

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor`` that lies on the device; a ``BudgetError`` where there is no room for it."""
        return self.room(tuple(tensor.shape), tensor.dtype).tensor.copy_(tensor)

    def room(self, shape: tuple[int, ...], dtype: torch.dtype, *, offset: int = 0) -> TensorRoom:
        """Return memory of the device for a tensor that lies at ``offset`` in its file; see ``room_for``."""
        count = math.prod(shape) * dtype.itemsize
        with self._lock:  # nobody takes the room between the look and the taking
            self._check(count)
            room = room_for(shape, dtype, offset=offset)
            self._count(room.tensor.untyped_storage(), room.tensor.untyped_storage().data_ptr(), count)
        return room

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies on the device."""
        return self.allocated > 0 and tensor.untyped_storage().data_ptr() in self._counted

    def allocate(self, size: int, *, stream: int = COMPUTING) -> Bytes:
        """Return ``size`` bytes of the device's memory; a ``BudgetError`` where there is no room for them.

        They are of the pool of ``stream``.
        """
        with self._lock:
            self._check(size)
            memory = private_bytes(size)
            self._count(memory, memory.ctypes.data, size, stream)
        return memory

    def hold(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor``, which was made there by computing; one that is counted stays so."""
        storage = tensor.untyped_storage()
        with self._lock:
            if not self.holds(tensor):
                self._check(storage.nbytes())
                self._count(storage, storage.data_ptr(), storage.nbytes())

    def _check(self, count: int) -> None:
        if self.allocated + count > self.capacity:
            raise BudgetError(
                f"max_memory.{self.device}: the simulated accelerator {self.device} is full: it holds"
                f" {format_bytes(self._allocated)} of {format_bytes(self.capacity)} ({self.capacity} bytes), and"
                f" {format_bytes(count)} more don't fit; give it {self._allocated + count} bytes or more"
            )

    def _count(self, owner: object, address: int, count: int, stream: int = COMPUTING) -> None:
        """Count ``count`` bytes at ``address``, of the pool of ``stream``, for as long as ``owner`` lives."""
        if not count:
            return
        with self._lock:
            block = self._counted[address] = self.allocator.allocate(count, stream)
            self._allocated += count
            self.peak = max(self.peak, self.allocated)
        weakref.finalize(owner, self._freed.append, (address, block, count)).atexit = False


class Devices:
    """The devices of one run. ``ledgers`` has the capacity of each simulated accelerator, in bytes.

    What a simulated one would have reserved is told of segments that expand where the plan says that it ``expands``.
    """

    def __init__(self, ledgers: Mapping[DeviceId, int] | None = None, *, expands: bool = False) -> None:
        given = ledgers or {}
        self._ledgers = {device: Ledger(device, capacity, expands=expands) for device, capacity in given.items()}

    def torch_device(self, device: DeviceId) -> torch.device:
        """Return the torch device that computes for ``device``."""
        return torch.device("cpu") if device in self._ledgers else torch_device(device)

    def is_apart(self, device: DeviceId) -> bool:
        """Return whether tensors must be copied from the host to be on ``device``."""
        return device in self._ledgers or self.torch_device(device).type != "cpu"

    def ledger(self, device: DeviceId) -> Ledger | None:
        """Return the ledger of a simulated accelerator; null for any other device."""
        return self._ledgers.get(device)

    def put(self, tensor: torch.Tensor, device: DeviceId) -> torch.Tensor:
        """Return ``tensor`` on ``device``: itself where it is there; a ``BudgetError`` where a device is full."""
        ledger = self._ledgers.get(device)
        if ledger is not None:
            return tensor if ledger.holds(tensor) else ledger.copy(tensor)
        try:
            return tensor.to(torch_device(device))
        except torch.OutOfMemoryError as error:
            raise full(device, tensor.nbytes) from error

    def room(self, shape: tuple[int, ...], dtype: torch.dtype, device: DeviceId, *, offset: int = 0) -> TensorRoom:
        """Return memory on ``device`` for a tensor that lies at ``offset`` in its file; see ``room_for``."""
        ledger, target = self._ledgers.get(device), self.torch_device(device)
        if ledger is not None:
            return ledger.room(shape, dtype, offset=offset)
        if target.type == "cpu":
            return room_for(shape, dtype, offset=offset)
        try:
            with outside_inference():  # or no other thread could read into it
                return TensorRoom(torch.empty(shape, dtype=dtype, device=target))
        except torch.OutOfMemoryError as error:
            raise full(device, math.prod(shape) * dtype.itemsize) from error

    @property
    def allocated(self) -> dict[DeviceId, int]:
        """What each simulated accelerator holds now, in bytes."""
        return {device: ledger.allocated for device, ledger in self._ledgers.items()}

    @property
    def reserved(self) -> dict[DeviceId, int]:
        """What torch would have reserved at most on each simulated accelerator for that, in bytes."""
        return {device: ledger.allocator.peak_reserved for device, ledger in self._ledgers.items()}

    @property
    def peaks(self) -> dict[DeviceId, int]:
        """The peak of each simulated accelerator, in bytes of what was put there or counted."""
        return {device: ledger.peak for device, ledger in self._ledgers.items()}


def full(device: DeviceId | None, count: int) -> BudgetError:
    """Return the error of an accelerator that has no room for ``count`` bytes of weights."""
    return BudgetError(
        f"max_memory.{device}: accelerator {device} is full: {format_bytes(count)} more of weights don't fit beside"
        " what it holds, this process's or another's; lower the budget, or free memory there"
    )


def current_device() -> int | None:
    """Return the index of the accelerator on which this thread has kernels run that don't ask where their operands lie;
    null where there is none, or none is in use.
    """
    here = torch.accelerator.current_accelerator()
    if here is None or (here.type == "cuda" and not torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return None
    return int(torch.accelerator.current_device_index())


def set_current_device(index: int) -> None:
    """Have such kernels of this thread run on the accelerator ``index``."""
    torch.accelerator.set_device_index(index)


def device_id(device: AnyDevice) -> DeviceId:
    """Return the device id of ``device``: the index of an accelerator, whatever its kind is called."""
    try:
        return parse_device(device if isinstance(device, int) else str(device))
    except ValueError:
        kind = str(device).partition(":")[0]
        here = torch.accelerator.current_accelerator()
        if here is None or kind != here.type:
            raise
        return torch.device(device).index or 0


def torch_device(device: DeviceId) -> torch.device:
    """Return the torch device behind a device id; the cpu on a machine without accelerators, where they are simulated.

    A ``ConfigError`` names one that a machine with accelerators doesn't have.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if not isinstance(device, int) or accelerator is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if device >= count:
        raise ConfigError(
            f"accelerator {device} isn't here: this machine has {count}, the last is {count - 1}; give one of these, "
            "or describe another machine in hardware.devices"
        )
    return torch.device(accelerator.type, device)
