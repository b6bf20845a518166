"""The physical limit: how fast a checkpoint's files can be read directly, with several reads in flight."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHUNK_BYTES = 2 * 2**20
MOST_BYTES = 3 * 10**9
THREADS = 4

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


def _places(folder: Path, size: int) -> list[Place]:
    """Return the places of whole reads of ``size`` bytes in the files of ``folder``, in order."""
    files = sorted(folder.glob("*.safetensors"))
    return [(file, offset) for file in files for offset in range(0, file.stat().st_size - size, size)]


def _bandwidth(places: Sequence[Place], size: int, threads: int) -> float:
    descriptors = {file: os.open(file, os.O_RDONLY | os.O_DIRECT) for file in {file for file, _ in places}}
    buffers = [mmap.mmap(-1, size) for _ in range(threads)]

    def work(number: int) -> int:
        mine = places[number::threads]
        return sum(os.preadv(descriptors[file], [buffers[number]], offset) for file, offset in mine)

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(work, range(threads)))
    seconds = time.perf_counter() - began
    for descriptor in descriptors.values():
        os.close(descriptor)
    return done / seconds
