"""How fast the machine moves bytes: given by the config, or measured once and kept beside the cache.

Decoding one token reads every weight once and does little else, so the bytes a second of each place that weights lie in
say how long a token takes. Storage is read past the page cache where the system allows it: a second look at the
same file would measure memory.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.units import parse_size

FILE_NAME = "rates.json"
_CHUNK = 2 * 2**20
_IN_FLIGHT = 4
_STORAGE_BYTES = 256 * 2**20
_HOST_BYTES = 16 * 2**20
_TARGET_BYTES = 2**18
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second of storage, host memory, the link to an accelerator, and an accelerator's memory."""

    storage: int = 10**9
    host: int = 10 * 10**9
    link: int = 12 * 10**9
    device: int = 800 * 10**9


def read_rates(hardware: Mapping[str, Any]) -> Rates:
    """Return the rates that ``hardware.rates`` gives (``{storage: 3GB, link: 25GB}``), or nominal ones."""
    return Rates(**{name: parse_size(size) for name, size in (hardware.get("rates") or {}).items()})


def local_rates(folder: Path, sample: Path | None) -> Rates:
    """Return this machine's rates: those kept in ``folder``, or measured now and kept there.

    ``sample`` is a large file on the storage in question (a shard of the checkpoint); each file system has a rate
    of its own. What can't be measured keeps its nominal value.
    """
    path = folder / FILE_NAME
    kept: dict[str, int] = json.loads(path.read_text()) if path.is_file() else {}
    storage = "storage" if sample is None else f"storage {sample.stat().st_dev}"
    measured = dict(kept)
    if "host" not in measured:
        measured["host"] = copy_speed()
    if sample is not None and storage not in measured and (speed := read_speed(sample)):
        measured[storage] = speed
    if measured != kept:
        _keep(path, measured)
    return Rates(storage=measured.get(storage, Rates().storage), host=measured["host"])


def _keep(path: Path, measured: Mapping[str, int]) -> None:
    """Write ``measured`` to ``path`` at once, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    draft.write_text(json.dumps(measured) + "\n")
    draft.replace(path)


def read_speed(path: Path, limit: int = _STORAGE_BYTES) -> int | None:
    """Return the bytes a second at which ``path`` is read past the page cache; null where it is too small.

    Read as streaming reads: chunks of 2 MiB, four of them in flight.
    """
    offsets = range(0, min(limit, path.stat().st_size - _CHUNK), _CHUNK)
    if len(offsets) < _IN_FLIGHT or not hasattr(os, "O_DIRECT"):
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    buffers = [mmap.mmap(-1, _CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(_IN_FLIGHT)]

    def read(number: int) -> int:
        return sum(os.preadv(descriptor, [buffers[number]], offset) for offset in offsets[number::_IN_FLIGHT])

    try:
        start = time.perf_counter()
        with ThreadPoolExecutor(_IN_FLIGHT) as pool:
            done = sum(pool.map(read, range(_IN_FLIGHT)))
        return round(done / (time.perf_counter() - start))
    except OSError:
        return None
    finally:
        os.close(descriptor)


def copy_speed(count: int = _HOST_BYTES) -> int:
    """Return the bytes a second at which one thread reads host memory."""
    source, target = memoryview(bytearray(count)), bytearray(_TARGET_BYTES)
    start = time.perf_counter()
    for _ in range(_ROUNDS):
        for begin in range(0, count, _TARGET_BYTES):
            target[:] = source[begin : begin + _TARGET_BYTES]
    return round(_ROUNDS * count / (time.perf_counter() - start))
