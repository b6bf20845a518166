"""What was seen of weight files, remembered in the user's cache: a file that nobody wrote to isn't looked into twice.

A look is known by the file's device and inode, and holds as long as size and both times are those of then. The second
time (ctime) nobody can set back: a file whose modification time was restored is looked at again. A file that was
changed within the last seconds is looked at each time, since a clock may stand still for as long; so is one where no
cache can be kept. What a look remembers is never the only ground for what is served: whoever reads a file later holds
it to the state in which it was opened. Needs no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offstage.pipeline.cache import user_cache
from offstage.pipeline.cache.sealed_files import DamagedError, read_sealed, write_sealed
from offstage.pipeline.errors import StorageError
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.samples import BLOCK_BYTES, BLOCKS, FILE_BLOCKS, sample
from offstage.stages.checkpoints.shard_files import ShardFile, check_regular

FOLDER = "looks"
SETTLED_SECONDS = 2.0
"""The coarsest clock of a file system that is about: FAT's."""
_MOST = 4096
"""So many looks are kept; of more, the oldest quarter goes."""
_HOW = [1, BLOCK_BYTES, BLOCKS, FILE_BLOCKS]
"""The version of the format, and what is sampled."""


@dataclass(frozen=True, slots=True)
class Look:
    """What is known of a weight file's content.

    ``header`` is the digest of its header, ``sampled`` of all samples, ``tensors`` of each tensor's in the order of the
    header, and ``sha256`` of the whole file where that was hashed.
    """

    header: str
    sampled: str
    tensors: tuple[str, ...]
    sha256: str | None = None


def look_at(file: ShardFile, tensors: Mapping[str, Extent]) -> Look:
    """Return what is known of ``file``, which holds ``tensors``: remembered, or looked at now and remembered."""
    state = _state(file)
    earlier = _remembered(file, state)
    if earlier is not None and len(earlier.tensors) == len(tensors):
        return earlier
    sampled = sample(file, tensors)
    look = Look(file.digest, sampled.digest, sampled.tensors)
    _remember(file, state, look)
    return look


def remember_whole(file: ShardFile, tensors: Mapping[str, Extent], sha256: str) -> None:
    """Remember that all of ``file``, as it is since it was opened, has this hash."""
    _remember(file, _state(file), replace(look_at(file, tensors), sha256=sha256))


def _state(file: ShardFile) -> list[int]:
    status = check_regular(file.path)
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _place(state: list[int]) -> Path:
    return user_cache() / FOLDER / f"{state[0]:x}-{state[1]:x}.json"


def _remembered(file: ShardFile, state: list[int]) -> Look | None:
    """Return what was seen of ``file`` in this very state; null where nothing was, or what is kept isn't whole."""
    try:
        content = read_sealed(_place(state))
    except (DamagedError, OSError, RuntimeError):  # the last: a user without a home
        return None
    match content:
        case {"how": how, "state": then, "header": str(header), "sampled": str(sampled), "tensors": list(tensors)}:
            sha256 = content.get("sha256")
            sound = all(isinstance(digest, str) for digest in tensors) and isinstance(sha256, str | None)
            if sound and (how, then, header) == (_HOW, state, file.digest):
                return Look(header, sampled, tuple(tensors), sha256)
    return None


def _remember(file: ShardFile, state: list[int], look: Look) -> None:
    """Keep ``look`` for the next run, where the file has been left alone for long enough; it is of use alone."""
    if time.time() - max(state[3], state[4]) / 1e9 < SETTLED_SECONDS or _state(file) != state:
        return
    content: dict[str, Any] = {"how": _HOW, "state": state, "header": look.header, "sampled": look.sampled}
    with suppress(OSError, StorageError, RuntimeError):
        path = _place(state)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(path, {**content, "tensors": list(look.tensors), "sha256": look.sha256})
        _bound(path.parent)


def _bound(folder: Path) -> None:
    """Remove the oldest looks where there are too many: of files that are long gone, as like as not."""
    with os.scandir(folder) as listed:
        names = [entry.path for entry in listed]
    if len(names) > _MOST:
        paths = sorted(map(Path, names), key=lambda path: path.lstat().st_mtime)
        for path in paths[: _MOST // 4]:
            path.unlink(missing_ok=True)
