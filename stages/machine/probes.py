"""Measuring how fast the machine moves bytes. Each probe takes about a second.

Storage is read past the page cache where the system allows it: a second look at the same file would measure memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

CHUNK_BYTES = 2 * 2**20
READERS = 4
"""How streaming reads: chunks of that size, that many in flight. So storage is measured."""
READING_THREADS = 8
"""How many threads read: so many are in flight while others unpack what they read, or wait for a core that computes."""
PINNED_BYTES = 16 * 2**20
"""The host memory that weights pass through on their way from storage to an accelerator."""
_STORAGE_BYTES, _TARGET_BYTES = 256 * 2**20, 24 * 2**20
"""How much of a file is read, and into how much memory: in less than that some systems bring it half as fast again, as
they find that memory in a processor's caches, where streamed weights don't lie.
"""
_DEVICE_BYTES = 128 * 2**20
_ROUNDS = 4
_READING_SECONDS, _PAUSE_SECONDS = 1.0, 0.2
"""For how long storage is read again and again, and how long it rests between: others slow a shared one for a while."""


def bounce_buffers(size: int) -> int:
    """Return how many buffers of ``size`` bytes experts pass through: one for each thread, fewer where it is large."""
    return max(1, min(READING_THREADS, round(PINNED_BYTES / size)))


def read_speed(path: Path, limit: int = _STORAGE_BYTES) -> int | None:
    """Return the bytes a second at which ``path`` is read again past the page cache; null where it is too small.

    Streaming reads for a token what it read for the one before, and some storage is faster then: the first reading
    isn't counted. Of the others the fastest is: what else the machine does only ever makes one slower.
    """
    offsets = range(0, min(limit, path.stat().st_size - CHUNK_BYTES), CHUNK_BYTES)
    if len(offsets) < READERS or not hasattr(os, "O_DIRECT"):
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    # Here and no sooner: it imports torch, and a file that can't be measured is looked at by every run.
    from offstage.stages.machine.aligned_memory import buffer_bytes

    buffers = buffer_bytes(_TARGET_BYTES).reshape(READERS, -1, CHUNK_BYTES)

    def read(number: int) -> int:
        turns = zip(offsets[number::READERS], cycle(buffers[number]), strict=False)
        return sum(os.preadv(descriptor, [buffer.data], offset) for offset, buffer in turns)

    try:
        with ThreadPoolExecutor(READERS) as pool:
            done, taken = sum(pool.map(read, range(READERS))), list[float]()
            while sum(taken) + _PAUSE_SECONDS * len(taken) < _READING_SECONDS:
                time.sleep(_PAUSE_SECONDS)
                start = time.perf_counter()
                list(pool.map(read, range(READERS)))
                taken.append(time.perf_counter() - start)
        return round(done / min(taken))
    except OSError:
        return None
    finally:
        os.close(descriptor)


def measure() -> dict[str, int]:
    """Return the rates of accelerator 0, by name: for a process of its own, since torch keeps what it once took."""
    from offstage.stages.machine.decoding_probe import launch_speed

    return {"host_to_device": link_speed(), "device": device_speed(), "launches": launch_speed("cuda:0")}


def link_speed(index: int = 0, count: int = _DEVICE_BYTES) -> int:
    """Return the bytes a second at which pinned host memory is copied to the accelerator ``index``."""
    import torch

    source = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(count, dtype=torch.uint8, device=torch.device("cuda", index))
    return round(count / _seconds(lambda: target.copy_(source, non_blocking=True), index))


def device_speed(index: int = 0, count: int = _DEVICE_BYTES) -> int:
    """Return the bytes a second at which the accelerator ``index`` moves its own memory; a copy reads and writes."""
    import torch

    source = torch.zeros(count, dtype=torch.uint8, device=torch.device("cuda", index))
    target = torch.empty_like(source)
    return round(2 * count / _seconds(lambda: target.copy_(source), index))


def _seconds(act: Callable[[], object], index: int) -> float:
    """Return the seconds that ``act`` takes the accelerator, the median of a few rounds after one to warm up."""
    import torch

    act()
    torch.cuda.synchronize(index)
    taken = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        act()
        torch.cuda.synchronize(index)
        taken.append(time.perf_counter() - start)
    return sorted(taken)[_ROUNDS // 2]
