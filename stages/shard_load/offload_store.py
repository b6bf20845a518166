"""The offload store: tensors that wait on disk and can't be served from the checkpoint as they are.

One store is for one checkpoint and one dtype, not for a plan: tensors are published one by one, and the
jobs of a sweep share them. Its files are the field's: ``NAME.dat`` with the raw bytes, ``index.json`` with
dtypes and shapes. Beside them ``offstage.json`` says what the store was made from. A folder that holds
anything else is never written to or read from: the store then goes into a subfolder of its own.

A tensor counts once the index names it, and the index names it only after its file is whole and on disk; a
kill leaves files that nobody reads. The lock saves two jobs writing the same tensors. Nothing depends on
it: both would write the same bytes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from pipeline.atomic_files import TEMPORARY, create_file, replace_file, sync_folder, write_whole
from pipeline.errors import StorageError
from stages.checkpoints.shard_files import ShardFile
from stages.units import DTYPE_BYTES, format_bytes

MARKER_NAME = "offstage.json"
INDEX_NAME = "index.json"
FORMAT_VERSION = 1
_PUBLISH_BYTES = 256 * 2**20
_STALE_SECONDS = 24 * 3600


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the store: dtype by name, shape, and the checkpoint's tensors that it was made from."""

    dtype: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """The size of its file in bytes."""
        return int(math.prod(self.shape) * DTYPE_BYTES[self.dtype])


class OffloadStore:
    """The store in one folder: what is in it, and adding to it.

    Make one with ``open_store``. Tensors that were put are in the index after ``publish``, and now and then
    before.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pending: dict[str, Mapping[str, Any]] = {}
        self._pending_bytes = 0

    def find_all(self, wanted: Mapping[str, StoredTensor]) -> dict[str, ShardFile]:
        """Return the files of those of the tensors ``wanted`` that are there, whole, made just as it says."""
        index = read_index(self.folder)
        whole = {}
        for name, tensor in wanted.items():
            path = self._path(name)
            if index.get(name) == _as_json(tensor) and path.is_file() and path.stat().st_size == tensor.bytes:
                whole[name] = ShardFile(path.name, path, tensor.bytes, None, "")
        return whole

    def put(self, name: str, tensor: StoredTensor, data: memoryview) -> None:
        """Write the bytes of one tensor to its file, on disk before it takes its name."""
        try:
            write_whole(self._path(name), data)
        except OSError as error:
            raise self._error(f"writing {name!r} ({format_bytes(len(data))})", error) from error
        self._pending[name] = _as_json(tensor)
        self._pending_bytes += len(data)
        if self._pending_bytes >= _PUBLISH_BYTES:
            self.publish()

    def publish(self) -> None:
        """Put what was written since the last time into the index."""
        if not self._pending:
            return
        try:
            sync_folder(self.folder)
            index = {**read_index(self.folder), **self._pending}
            replace_file(self.folder / INDEX_NAME, json.dumps(index, indent=1) + "\n")
        except OSError as error:
            raise self._error("writing its index", error) from error
        self._pending.clear()
        self._pending_bytes = 0

    def refer(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Put ``entries`` into the index for tensors that lie elsewhere, or in a file of another name."""
        with self.locked():
            self._pending.update(entries)
            self.publish()

    def check_space(self, wanted: Sequence[StoredTensor]) -> None:
        """Refuse, before anything is written, to put into the folder what its disk has no room for, or can't take."""
        needed = sum(tensor.bytes for tensor in wanted)
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise StorageError(
                f"{self.folder}: {len(wanted)} offloaded tensors need {format_bytes(needed)} ({needed} bytes), and "
                f"{format_bytes(free)} are free; set offload_folder to a folder on a larger disk"
            )
        if wanted and not os.access(self.folder, os.W_OK):
            raise _unusable(self.folder, "it can't be written", needed)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store's lock, where the file system has locks, so that two jobs don't do the same work."""
        lock = filelock.FileLock(self.folder / ".lock")
        with suppress(OSError, RuntimeError):
            lock.acquire()
        try:
            self._sweep()
            yield
        finally:
            lock.release()

    def _sweep(self) -> None:
        """Remove the temporary files of runs that were killed long ago."""
        for leftover in self.folder.glob(f"{TEMPORARY}*"):
            with suppress(OSError):
                if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                    leftover.unlink()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.dat"

    def _error(self, doing: str, error: OSError) -> StorageError:
        return StorageError(
            f"{self.folder}: {doing} failed: {error.strerror or error}; free some space there or set offload_folder "
            "to a folder that can be written"
        )


def open_store(folder: Path, key: str, *, needed_bytes: int = 0) -> OffloadStore:
    """Return the store for ``key`` in ``folder``, made if it isn't there.

    A folder that holds something else keeps it, and the store goes into its subfolder named ``key``. ``needed_bytes``
    is how much is to be kept there, for the ``StorageError`` of a folder that can't be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if claim(folder, key):
            return OffloadStore(folder)
        own = folder / key
        own.mkdir(exist_ok=True)
        if claim(own, key):
            return OffloadStore(own)
    except OSError as error:
        raise _unusable(folder, error.strerror or str(error), needed_bytes) from error
    raise StorageError(f"{own}: holds files of something else; move them away or set another offload_folder")


def _unusable(folder: Path, reason: str, needed: int) -> StorageError:
    return StorageError(
        f"{folder}: the offload folder can't be used: {reason}; set offload_folder to a folder that can be written "
        f"and has {format_bytes(needed)} ({needed} bytes) free"
    )


def claim(folder: Path, key: str) -> bool:
    """Return whether ``folder`` is the store for ``key``, after marking it so if it is empty."""
    marker = folder / MARKER_NAME
    mark = {"format": FORMAT_VERSION, "key": key}
    if not marker.exists() and _is_empty(folder):  # a store that is whole may lie on a disk that can't be written
        with suppress(FileExistsError):
            create_file(marker, json.dumps(mark) + "\n")
    return bool(_read_json(marker) == mark)


def read_index(folder: Path) -> dict[str, Any]:
    """Return what ``index.json`` in ``folder`` says of each tensor; nothing where there is no index."""
    index = _read_json(folder / INDEX_NAME)
    return index if isinstance(index, dict) else {}


def _is_empty(folder: Path) -> bool:
    """Return whether nothing is in ``folder`` but hidden files, as another job's claim in the making is."""
    return all(item.name.startswith(".") for item in folder.iterdir())


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _as_json(tensor: StoredTensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "shape": list(tensor.shape), "sources": list(tensor.sources)}
