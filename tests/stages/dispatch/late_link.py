"""An accelerator on which everything happens late, for tests of who waits for what.

Copies, urgent ones, unpacking and computing are queues, each worked off by a thread of its own, with pauses. They see
memory as a device does, by its address: nothing that they were asked for keeps a region or a buffer as it is. A copy
first fills its target with poison, and reads its source at the very end. Computing reads its weights from its beginning
to its end, which is a while later. So computing that doesn't wait for its weights reads poison, a region that is taken
too early is poisoned under the computing that still reads it, what is given up on its way and arrives all the same
lands in what came after it, and a buffer that is used again too early arrives with the next read's bytes.

Its memory is given by the rules of torch's caching allocator: a block that is let go is at once there for what is taken
next, whatever other queues than computing still do to it.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch

from offstage.stages.dispatch.transfer.link import Operators, Piece
from offstage.stages.machine.aligned_memory import Bytes, private_bytes
from offstage.stages.machine.caching_allocator import Block, CachingAllocator
from offstage.stages.units import DEVICE_ALIGNMENT

POISON = 0xA5
Kernel = Callable[[], object]


def at(address: int, count: int) -> Bytes:
    """Return the bytes at ``address``, without keeping anything there alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))


class Stream:
    """Work that is done in order, by a thread of its own, each piece after a pause of up to ``pause`` seconds."""

    def __init__(self, pause: float) -> None:
        self._work: SimpleQueue[Kernel | None] = SimpleQueue()
        self._chance, self._pause = random.Random(5), pause
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, work: Kernel) -> None:
        self._work.put(work)

    def end(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            time.sleep(self._chance.random() * self._pause)
            work()


class DeviceBytes:
    """All memory of such an accelerator, of which ``allocator`` says what is whose."""

    def __init__(self, capacity: int) -> None:
        self._bytes, self.allocator = private_bytes(capacity), CachingAllocator(capacity)
        self.address: int = self._bytes.ctypes.data
        self._gone: deque[Block] = deque()
        self._lock = threading.Lock()

    def take(self, size: int) -> Bytes:
        """Return ``size`` bytes, which others get once nothing views them; what was there before stays there."""
        with self._lock:
            while self._gone:
                self.allocator.free(self._gone.popleft())
            block = self.allocator.allocate(size)
        view = at(self.address + block.begin, size)
        weakref.finalize(view, _let_go, self._gone, block, self._bytes).atexit = False
        return view


def _let_go(gone: deque[Block], block: Block, _whole: Bytes) -> None:
    gone.append(block)


class LateMemory:
    alignment = DEVICE_ALIGNMENT

    def __init__(self, memory: Bytes) -> None:
        self.size, self.bytes = memory.nbytes, memory

    def lend(self, begin: int, length: int) -> tuple[torch.Tensor, object]:
        region = self.bytes[begin : begin + length]
        return torch.frombuffer(region, dtype=torch.uint8), region


_CASES_AT_ONCE = 8


def faults_of_each(
    faults: Callable[[int, Path], Sequence[str]], cases: Sequence[int], folder: Path
) -> list[Sequence[str]]:
    """Return the ``faults`` of each case, several cases at a time: most of what one takes is pauses of its links."""
    folders = [folder / str(case) for case in cases]
    for each in folders:
        each.mkdir(exist_ok=True)
    with ThreadPoolExecutor(_CASES_AT_ONCE) as pool:
        return [*pool.map(faults, cases, folders)]


CAPACITY = 2**29
"""Of what isn't used there is none."""


class LateLink:
    """The link to such an accelerator; the thread that makes it is the one that runs the model, and must not wait.

    One ``beside`` another has queues of its own for all but computing.
    """

    in_place = False

    def __init__(
        self,
        *,
        copy_pause: float = 0.002,
        compute_pause: float = 0.002,
        unpack_pause: float | None = None,
        urgent_pause: float | None = None,
        beside: LateLink | None = None,
    ) -> None:
        self.copies, self._beside = Stream(copy_pause), beside
        self.computing = Stream(compute_pause) if beside is None else beside.computing
        self.urgent = Stream(compute_pause if urgent_pause is None else urgent_pause)
        self.unpacking = Stream(copy_pause if unpack_pause is None else unpack_pause)
        self._kernel_seconds = compute_pause
        self.device, self.taken = DeviceBytes(CAPACITY) if beside is None else beside.device, list[int]()
        self.pinned: list[Bytes] = [] if beside is None else beside.pinned
        self.wrong: list[str] = [] if beside is None else beside.wrong
        self.registers = True
        self._stalled = 0.0
        self._model_thread = threading.get_ident()
        self._closing = False

    def memory(self, size: int) -> LateMemory:
        self.taken.append(size)
        return LateMemory(self.device.take(size))

    def computed(self) -> threading.Event:
        happened = threading.Event()
        self.computing.add(happened.set)
        return happened

    def follow(self, event: object) -> None:
        assert isinstance(event, threading.Event)

        def work() -> None:
            began = time.perf_counter()
            event.wait()
            self._stalled += time.perf_counter() - began

        self.computing.add(work)

    def stalled(self) -> float:
        waited, self._stalled = self._stalled, 0.0
        return waited

    def copy(self, pieces: Sequence[Piece], *, after: object, urgent: bool = False) -> threading.Event:
        spans, done = [(s.data_ptr(), t.data_ptr(), s.nbytes) for s, t in pieces], threading.Event()
        for begin, end, count in spans:
            if not self._is_pinned(begin, count) and not self._is_pinned(end, count):
                self.wrong.append("a copy from memory that isn't pinned, or to such")

        def work() -> None:
            if isinstance(after, threading.Event):
                after.wait()
            for _, end, count in spans:
                at(end, count)[:] = POISON
            time.sleep(0.001)
            for begin, end, count in spans:
                at(end, count)[:] = at(begin, count)
            done.set()

        assert all(source.nbytes == target.nbytes for source, target in pieces)
        (self.urgent if urgent else self.copies).add(work)
        return done

    def _is_pinned(self, begin: int, count: int) -> bool:
        return any(m.ctypes.data <= begin and begin + count <= m.ctypes.data + m.nbytes for m in self.pinned)

    def unpack(
        self,
        operators: Operators,
        data: Sequence[torch.Tensor],
        target: torch.Tensor,
        *,
        after: Sequence[object],
        scratch_bytes: int,
    ) -> threading.Event:
        given, made = [(part.data_ptr(), part.nbytes) for part in data], (target.data_ptr(), target.nbytes)
        done = threading.Event()

        def work() -> None:
            for event in after:
                if isinstance(event, threading.Event):
                    event.wait()
            time.sleep(0.001)
            operators([torch.from_numpy(at(*part)) for part in given], torch.from_numpy(at(*made)))
            done.set()

        self.unpacking.add(work)
        return done

    def finish(self, event: object) -> None:
        if threading.get_ident() == self._model_thread and not self._closing:
            self.wrong.append("the thread that runs the model waited for the accelerator")
        assert isinstance(event, threading.Event)
        event.wait()

    def register(self, memory: Bytes) -> bool:
        if self.registers:
            self.pinned.append(memory)
        return self.registers

    def unregister(self, address: int) -> None:
        self.pinned[:] = [memory for memory in self.pinned if memory.ctypes.data != address]

    def close(self) -> None:
        self._closing = True
        for stream in (self.computing, self.copies, self.urgent, self.unpacking):
            idle = threading.Event()
            stream.add(idle.set)
            idle.wait()

    def end(self) -> None:
        self.close()
        for stream in (self.copies, self.urgent, self.unpacking, *([self.computing] if self._beside is None else [])):
            stream.end()

    def write(self, target: torch.Tensor, value: int) -> None:
        """Have computing fill ``target``, when its turn comes."""
        address, count = target.data_ptr(), target.nbytes
        self.computing.add(lambda: at(address, count).fill(value))

    def launch(self, weight: torch.Tensor, expected: torch.Tensor) -> None:
        """Have computing compare what lies where ``weight`` is now with ``expected``, when its turn comes."""
        address, wanted, name = weight.data_ptr(), expected.clone().view(-1).view(torch.uint8).numpy(), len(self.wrong)

        def kernel() -> None:
            for seconds in (self._kernel_seconds, 0.0):
                content = at(address, wanted.nbytes)
                if wanted.nbytes and not np.array_equal(content, wanted):
                    share = float(np.mean(content == POISON))
                    self.wrong.append(f"computed with other bytes than the weight's, {share:.0%} poison ({name})")
                    return
                time.sleep(seconds)

        self.computing.add(kernel)
