"""The link to a CUDA device: streams of its own for copies, urgent ones, and unpacking, and events between these and
computing.

Nothing here is decided; see ``link`` for what is asked, and the tests of ``mover`` for who asks it when.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, cast

import torch

from offstage.stages.dispatch.transfer.link import Event, Operators, Piece
from offstage.stages.machine.aligned_memory import Bytes, outside_inference
from offstage.stages.machine.devices import full
from offstage.stages.units import DEVICE_ALIGNMENT

_PORTABLE = 1
"""cudaHostRegisterPortable: registered for all devices of the process, not for the current one alone."""


class _DeviceSpan:
    """A stretch of device memory, as torch takes it from other libraries.

    A tensor made from it has a storage of its own and keeps this object alive, so the object's end is the region's;
    slices of one tensor would share its storage, and nobody could tell when the last view of a region is gone.
    """

    def __init__(self, base: torch.Tensor, begin: int, length: int) -> None:
        self._base = base
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (base.data_ptr() + begin, False),
            "strides": None,
            "version": 2,
        }


class CudaMemory:
    """``size`` bytes on ``device``, allocated once; a ``BudgetError`` where there is no room for them."""

    alignment = DEVICE_ALIGNMENT

    def __init__(self, device: torch.device, size: int) -> None:
        self.size = size
        try:
            with outside_inference():
                self._base = torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise full(device.index, size) from error

    def lend(self, begin: int, length: int) -> tuple[torch.Tensor, object]:
        """Return the region at ``begin``: a tensor that keeps alive what is watched."""
        span = _DeviceSpan(self._base, begin, length)
        with outside_inference():  # or no other thread could copy into it
            return torch.as_tensor(span, device=self._base.device), span


class _OnStream:
    """A context in which ``stream`` is the current one in place of ``before``, which is of the same device.

    As ``torch.cuda.stream``, in less time: each copy enters it.
    """

    def __init__(self, stream: torch.cuda.Stream, before: torch.cuda.Stream) -> None:
        self._stream, self._before = stream, before

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._before)


class CudaLink:
    """The link to the CUDA device ``device`` (with an index)."""

    in_place = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._urgent = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._unpacking = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._known: dict[int, torch.cuda.Stream] = {}
        self._last = self._current()
        self._followed: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # when it came to wait, and for what
        self._stalled = 0.0
        self._noting = threading.Lock()  # a backward pass has threads of its own, and any may ask what was waited

    def memory(self, size: int) -> CudaMemory:
        """Return ``size`` bytes of the device's memory."""
        return CudaMemory(self._device, size)

    def computed(self) -> Event:
        """Return an event behind all that the current stream was given."""
        event = _event()
        event.record(self._computing())
        return event

    def follow(self, event: Event) -> None:
        """Have the current stream wait for ``event``, unless it has happened; the host doesn't."""
        stream, done = self._computing(), cast("torch.cuda.Event", event)
        if done.query():  # type: ignore[no-untyped-call]
            return
        came = _event(timed=True)
        came.record(stream)
        stream.wait_event(done)
        self._followed.append((came, done))
        self._note_waits()  # of none that are over is kept more than its time

    def stalled(self) -> float:
        """Return the seconds between coming to wait and going on, of all waits that are over, since asked last."""
        self._note_waits()
        with self._noting:
            seconds, self._stalled = self._stalled, 0.0
        return seconds

    def _note_waits(self) -> None:
        with self._noting:
            while self._followed and all(event.query() for event in self._followed[0]):  # type: ignore[no-untyped-call]
                came, done = self._followed.popleft()
                self._stalled += max(0.0, came.elapsed_time(done)) / 1000

    def _computing(self) -> torch.cuda.Stream:
        """Return the current stream; where it is another than before, it first waits for what that one was given."""
        stream = self._current()
        if stream is not self._last:
            stream.wait_stream(self._last)
            self._last = stream
        return stream

    def _current(self) -> torch.cuda.Stream:
        """Return the current stream of the device, one object each: torch would make one anew each time."""
        handle = torch._C._cuda_getCurrentRawStream(self._device.index)
        stream = self._known.get(handle)
        if stream is None:
            stream = self._known[handle] = torch.cuda.current_stream(self._device.index)
        return stream

    def _on(self, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
        """Return a context in which ``stream``, which is of the device, is the current one."""
        if torch.cuda.current_device() != self._device.index:
            return torch.cuda.stream(stream)
        return _OnStream(stream, self._current())

    def copy(self, pieces: Sequence[Piece], *, after: Event, urgent: bool = False) -> Event:
        """Have a copy stream copy ``pieces`` when ``after`` has happened: that of what is ``urgent`` goes first."""
        done = _event(blocking=True, timed=True)  # whoever waits for it sleeps
        stream = self._urgent if urgent else self._copies
        with self._on(stream):
            stream.wait_event(cast("torch.cuda.Event", after))
            for source, target in pieces:
                target.copy_(source, non_blocking=True)
            done.record(stream)
        return done

    def unpack(
        self,
        operators: Operators,
        data: Sequence[torch.Tensor],
        target: torch.Tensor,
        *,
        after: Sequence[Event],
        scratch_bytes: int,
    ) -> Event:
        """Have the stream for unpacking run ``operators`` when all of ``after`` has happened.

        What they allocate is of that stream, which gives it to its next operators in its own order.
        """
        done = _event(blocking=True, timed=True)
        with self._on(self._unpacking):
            for event in after:
                self._unpacking.wait_event(cast("torch.cuda.Event", event))
            try:
                operators(data, target)
            except torch.OutOfMemoryError as error:
                raise full(self._device.index, scratch_bytes) from error
            done.record(self._unpacking)
        return done

    def finish(self, event: Event) -> None:
        """Wait here for ``event``."""
        cast("torch.cuda.Event", event).synchronize()

    def register(self, memory: Bytes) -> bool:
        """Page-lock ``memory`` as it is; return whether the driver did."""
        if int(_runtime().cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE)) == 0:
            return True
        with suppress(RuntimeError):  # the refusal is reported once more, by the next kernel that is launched
            torch.ones(1, device=self._device)
        return False

    def unregister(self, address: int) -> None:
        """Unlock the memory at ``address``; the driver first ends the copies from there."""
        _runtime().cudaHostUnregister(address)

    def close(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)


def _event(*, blocking: bool = False, timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed, blocking=blocking)  # type: ignore[no-untyped-call]


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
