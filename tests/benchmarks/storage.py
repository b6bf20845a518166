"""The physical limit: how fast a checkpoint's files can be read directly, with several reads in flight."""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHUNK_BYTES = 2 * 2**20


def direct_read_bandwidth(folder: Path, *, threads: int = 4, most_bytes: int = 3 * 10**9) -> float:
    """Return bytes a second of ``O_DIRECT`` reads of the safetensors files of ``folder``, past the page cache."""
    jobs = [
        (file, offset)
        for file in sorted(folder.glob("*.safetensors"))
        for offset in range(0, file.stat().st_size - CHUNK_BYTES, CHUNK_BYTES)
    ][: most_bytes // CHUNK_BYTES]
    descriptors = {file: os.open(file, os.O_RDONLY | os.O_DIRECT) for file, _ in jobs}
    buffers = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(threads)]

    def work(number: int) -> int:
        return sum(os.preadv(descriptors[file], [buffers[number]], offset) for file, offset in jobs[number::threads])

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(work, range(threads)))
    seconds = time.perf_counter() - began
    for descriptor in descriptors.values():
        os.close(descriptor)
    return done / seconds
