"""Checksums of large files, block by block: a flipped bit is found, and a part can be checked for the whole.

The files of an offload store are too large to be hashed at every run. Its index says of each its size and the CRC-32
of each block; all of them are compared where that is asked for, and a few otherwise, others each time. A CRC is against
accidents: whoever can write to a cache can choose what is in it.
"""

from __future__ import annotations

import os
import random
import stat
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offstage.pipeline.regular_files import open_regular, read_json

BLOCK_BYTES = 4 * 2**20
_PIECE_BYTES = 2**18
"""What is read of a block at a time: no plan counts it, and a budget may be less than the blocks that are in flight."""
SAMPLE = 16
"""Blocks of a store that are checked whenever it is opened: tens of milliseconds."""
INDEX_NAME = "index.json"
"""The file of an offload store that says what is in it."""
MARKER_NAME = "offstage.json"
"""The file that makes a folder an offload store, and says of what."""
_IN_FLIGHT = 8


@dataclass(frozen=True, slots=True)
class SummedFile:
    """A file of ``size`` bytes and the sums that its blocks had when it was written."""

    path: Path
    size: int
    sums: tuple[str, ...]


class RunningSums:
    """The CRC-32 of each block, in hex, of what is told piece by piece."""

    def __init__(self) -> None:
        self.bytes = 0
        self._sums: list[str] = []
        self._last = 0

    def passed(self, piece: bytes | memoryview) -> bytes | memoryview:
        """Take the bytes that come next, and return them."""
        left = memoryview(piece)
        while left:
            count = BLOCK_BYTES - self.bytes % BLOCK_BYTES
            self._last = zlib.crc32(left[:count], self._last)
            self.bytes += len(left[:count])
            left = left[count:]
            if self.bytes % BLOCK_BYTES == 0:
                self._sums.append(_hex(self._last))
                self._last = 0
        return piece

    @property
    def sums(self) -> list[str]:
        """The sums of all that was told."""
        return [*self._sums, *([_hex(self._last)] if self.bytes % BLOCK_BYTES else [])]


def find_damage(files: Mapping[str, SummedFile], *, full: bool) -> dict[str, str]:
    """Return what is wrong with each of ``files`` that isn't as it was written, by its name.

    Sizes are always compared, blocks all where ``full`` says so, else ``SAMPLE`` of them, drawn anew at each call.
    """
    damage = {name: wrong for name, file in files.items() if (wrong := _outward_damage(file))}
    blocks = [(name, index) for name in files if name not in damage for index in range(len(files[name].sums))]
    if not full and len(blocks) > SAMPLE:
        blocks = random.Random().sample(blocks, SAMPLE)  # its own: the user's numbers stay those of the user's seed

    def check(block: tuple[str, int]) -> str | None:
        return _block_damage(files[block[0]], block[1])

    with ThreadPoolExecutor(_IN_FLIGHT) as pool:
        for (name, _), wrong in zip(blocks, pool.map(check, blocks), strict=True):
            if wrong:
                damage.setdefault(name, wrong)
    return damage


def find_store_damage(folder: Path) -> str | None:
    """Return what is wrong with the offload store in ``folder``, every block of it checked; None if it is whole."""
    for path in sorted(folder.rglob(INDEX_NAME)):
        try:
            index = read_json(path)
            files = _summed_files(path.parent, index) if isinstance(index, dict) else None
        except (OSError, ValueError):
            files = None
        if files is None:
            return f"{path.name} can't be read"
        for name, wrong in find_damage(files, full=True).items():
            return f"tensor {name!r} {wrong}"
    return None


def _summed_files(folder: Path, index: Mapping[str, Any]) -> dict[str, SummedFile]:
    """Return the files that ``index`` has sums of; tensors that lie elsewhere have none."""
    files: dict[str, SummedFile] = {}
    for name, entry in index.items():
        if isinstance(entry, dict) and "/" not in name:
            file = summed_file(folder / f"{name}.dat", entry)
            files |= {name: file} if file else {}
    return files


def summed_file(path: Path, entry: Mapping[str, Any]) -> SummedFile | None:
    """Return the file ``path`` with what its index's ``entry`` says of it; None where that says nothing."""
    size, sums = entry.get("bytes"), entry.get("blocks")
    if type(size) is not int or not isinstance(sums, list) or len(sums) != -(-size // BLOCK_BYTES):
        return None
    return SummedFile(path, size, tuple(map(str, sums)))


def _outward_damage(file: SummedFile) -> str | None:
    try:
        status = file.path.stat()
    except (OSError, ValueError):
        return "is missing"
    if not stat.S_ISREG(status.st_mode):
        return "isn't a file"
    return None if status.st_size == file.size else f"has {status.st_size} bytes instead of {file.size}"


def _block_damage(file: SummedFile, index: int) -> str | None:
    try:
        with os.fdopen(open_regular(file.path), "rb") as opened:  # buffered: reads on after a short count
            opened.seek(index * BLOCK_BYTES)
            checksum = 0
            for begin in range(0, BLOCK_BYTES, _PIECE_BYTES):
                checksum = zlib.crc32(opened.read(min(_PIECE_BYTES, BLOCK_BYTES - begin)), checksum)
    except OSError as error:
        return f"can't be read ({error.strerror})"
    return None if _hex(checksum) == file.sums[index] else f"doesn't match its checksum (block {index})"


def _hex(checksum: int) -> str:
    return f"{checksum:08x}"
