"""The physical limits: direct reads and writes of files, several in flight; copies in memory and over the link."""

from __future__ import annotations

import mmap
import os
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from offstage.stages.machine.aligned_memory import buffer_bytes

CHUNK_BYTES = 2 * 2**20
MOST_BYTES = 3 * 10**9
THREADS = 4
COPY_BYTES, COPIES = 256 * 2**20, 5

Place = tuple[Path, int]
"""A file and an offset in it."""


def direct_read_bandwidth(folder: Path, *, threads: int = THREADS, most_bytes: int = MOST_BYTES) -> float:
    """Return bytes a second of ``O_DIRECT`` reads of the safetensors files of ``folder``, past the page cache."""
    return _bandwidth(_places(folder, CHUNK_BYTES)[: most_bytes // CHUNK_BYTES], CHUNK_BYTES, threads)


def random_read_bandwidth(
    folder: Path, *, read_bytes: int, threads: int = THREADS, most_bytes: int = MOST_BYTES
) -> float:
    """Return the same of reads of ``read_bytes``, whole pages of them, in places all over the files, none twice."""
    size = read_bytes // mmap.PAGESIZE * mmap.PAGESIZE
    places = _places(folder, size)
    random.Random(0).shuffle(places)
    return _bandwidth(places[: most_bytes // size], size, threads)


def direct_bandwidths(folder: Path, *, threads: int = THREADS, total_bytes: int = 10**9) -> tuple[float, float]:
    """Return bytes a second of ``O_DIRECT`` writes of a new file in ``folder``, and of reads of it."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".tmp-limit-") as file:
        path = Path(file.name)
        places = [(path, offset) for offset in range(0, total_bytes // CHUNK_BYTES * CHUNK_BYTES, CHUNK_BYTES)]
        return _bandwidth(places, CHUNK_BYTES, threads, write=True), _bandwidth(places, CHUNK_BYTES, threads)


def memory_bandwidth(total_bytes: int = COPY_BYTES) -> float:
    """Return bytes a second at which torch copies host memory that has been used before."""
    source, target = (torch.zeros(total_bytes, dtype=torch.uint8) for _ in range(2))
    target.copy_(source)
    began = time.perf_counter()
    for _ in range(COPIES):
        target.copy_(source)
    return COPIES * total_bytes / (time.perf_counter() - began)


def pinned_bandwidth(total_bytes: int = COPY_BYTES) -> float:
    """Return bytes a second at which CUDA's first device copies to pinned host memory."""
    source = torch.zeros(total_bytes, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(total_bytes, dtype=torch.uint8, pin_memory=True)
    target.copy_(source)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(COPIES):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return COPIES * total_bytes / (time.perf_counter() - began)


def _places(folder: Path, size: int) -> list[Place]:
    """Return the places of whole reads of ``size`` bytes in the files of ``folder``, in order."""
    files = sorted(folder.glob("*.safetensors"))
    return [(file, offset) for file in files for offset in range(0, file.stat().st_size - size, size)]


def _bandwidth(places: Sequence[Place], size: int, threads: int, *, write: bool = False) -> float:
    flags = (os.O_WRONLY if write else os.O_RDONLY) | os.O_DIRECT
    move = os.pwritev if write else os.preadv
    descriptors = {file: os.open(file, flags) for file in {file for file, _ in places}}
    memory = buffer_bytes(threads * size).data
    memory[:] = os.urandom(threads * size)  # zeros might never reach the storage
    buffers = [memory[begin : begin + size] for begin in range(0, threads * size, size)]

    def work(number: int) -> int:
        mine = places[number::threads]
        return sum(move(descriptors[file], [buffers[number]], offset) for file, offset in mine)

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(work, range(threads)))
    seconds = time.perf_counter() - began
    for descriptor in descriptors.values():
        os.close(descriptor)
    return done / seconds
