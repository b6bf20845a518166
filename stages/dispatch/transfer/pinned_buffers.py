"""The way station between storage and an accelerator: a few buffers of pinned host memory, used in turn.

A buffer holds one read, or what several threads unpack together. It is given to the next one when the accelerator has
copied it, which the thread that reads waits for. So what is pinned stays small whatever is streamed, and over however
many links: it need only cover the reads that are under way and the copies that follow them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any

import torch

from offstage.stages.dispatch.transfer.link import Event, Link, pin
from offstage.stages.machine.aligned_memory import Bytes, buffer_bytes
from offstage.stages.machine.probes import CHUNK_BYTES, PINNED_BYTES

BUFFERS = PINNED_BYTES // CHUNK_BYTES
"""Pinned buffers: one for each thread that reads, and one for each that is being copied meanwhile."""


class Buffer:
    """One buffer: its ``memory``, and the same bytes as a ``tensor``."""

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self._copied: tuple[Link, Event] | None = None

    def note_copy(self, link: Link, done: Event) -> None:
        """Hear when ``link`` will have copied what is in it."""
        self._copied = link, done

    def wait(self) -> None:
        """Wait until the last copy from it is done."""
        if self._copied is not None:
            link, done = self._copied
            link.finish(done)
            self._copied = None


class PinnedBuffers:
    """``count`` buffers of ``size`` bytes each, page-aligned, in one piece of memory registered with ``link``.

    What a link registers all links copy from by themselves.
    """

    def __init__(self, link: Link, *, count: int, size: int) -> None:
        self._memory = buffer_bytes(count * size)
        self._unpin = pin(link, self._memory)
        self._free: SimpleQueue[Buffer] = SimpleQueue()
        for begin in range(0, count * size, size):
            self._free.put(Buffer(self._memory[begin : begin + size]))

    @contextmanager
    def lend(self) -> Iterator[Buffer]:
        """Lend the buffer whose copy is the oldest, once that is done."""
        buffer = self._free.get()
        try:
            buffer.wait()
            yield buffer
        finally:
            self._free.put(buffer)

    def close(self) -> None:
        """Unpin the memory; all copies are done."""
        self._unpin()


def buffers_for(lengths: Sequence[int], link: Link, *, staging_bytes: int) -> PinnedBuffers | None:
    """Return the buffers for reads of these ``lengths``; null where there are none.

    They take no more than the ``staging_bytes`` of all links together, unless one alone is more.
    """
    if not lengths:
        return None
    size = max(lengths)
    count = min(BUFFERS, len(lengths), staging_bytes // size, PINNED_BYTES // size)
    return PinnedBuffers(link, count=max(1, count), size=size)


class SharedBuffer:
    """One of ``buffers``, which ``jobs`` fill together, and which goes back once all of them are done or cancelled.

    Jobs of a pool begin in the order in which they were asked for: who waits for a buffer here waits for jobs that have
    begun.
    """

    def __init__(self, buffers: PinnedBuffers, jobs: int) -> None:
        self._buffers, self._jobs = buffers, jobs
        self._left, self._filled = jobs, 0
        self._buffer: Buffer | None = None
        self._taking, self._counting = threading.Lock(), threading.Lock()
        self._lent = ExitStack()

    def take(self) -> Buffer:
        """Return the buffer, once there is one."""
        with self._taking:
            if self._buffer is None:
                self._buffer = self._lent.enter_context(self._buffers.lend())
        return self._buffer

    def fill(self) -> bool:
        """Say that a job has filled its part; return whether that was the last one missing."""
        with self._counting:
            self._filled += 1
            return self._filled == self._jobs

    def watch(self, job: Future[Any]) -> None:
        """Have the buffer go back with the last of the jobs that are watched."""
        job.add_done_callback(self._let_go)

    def _let_go(self, _job: Future[Any]) -> None:
        with self._counting:
            self._left -= 1
            if not self._left:
                self._lent.close()
