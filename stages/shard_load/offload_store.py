"""The offload store: tensors that wait on disk and can't be served from the checkpoint as they are.

One store is for one checkpoint and one dtype, not for a plan: tensors are published one by one, and the jobs of a sweep
share them. Its files are the field's: ``NAME.dat`` with the raw bytes, ``index.json`` with dtypes and shapes. Beside
them ``offstage.json`` says what the store was made from. A folder that holds anything else is never written to or read
from: the store then goes into a subfolder of its own.

Of what the checkpoint holds plain it may have packed copies, for who waits for its storage: ``NAME.zstd.dat``, whose
entry in the index has the table of its tiles. Of a tensor that doesn't shrink the index says so, and no copy is made.
Where ``model.quantize`` asks for it, a store of its own has what the weights of a shard are quantised to, some in a
file: ``SHARD.q8_0-0.dat``.

A tensor counts once the index names it, and the index names it only after its file is whole and on disk; a kill leaves
files that nobody reads. The lock saves two jobs writing the same tensors. Nothing depends on it: both would write the
same bytes, and the index keeps what each of them adds (``add_entries``).
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offstage.pipeline.atomic_files import TEMPORARY, create_file, replace_file, sync_folder, write_pieces
from offstage.pipeline.cache.block_sums import (
    INDEX_NAME,
    MARKER_NAME,
    RunningSums,
    SummedFile,
    find_damage,
    summed_file,
)
from offstage.pipeline.cache.locks import locked
from offstage.pipeline.cache.sealed_files import DAMAGED, move_aside
from offstage.pipeline.errors import OffstageError, StorageError
from offstage.pipeline.regular_files import NotRegularError, read_json, read_object
from offstage.stages.checkpoints.codecs.planes import NAME, codec_of
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import AtRest, rest_bytes
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.units import format_bytes, tensor_bytes

FORMAT_VERSION = 2
_PUBLISH_BYTES = 256 * 2**20
_STALE_SECONDS = 24 * 3600
_ADDED = ".added-"
"""How the name begins of a file with what one writer adds to an index."""

_log = logging.getLogger("offstage")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the store: dtype by name, shape, and the checkpoint's tensors that it was made from.

    It is as it is used; with a ``run`` it is a packed copy beside that, of which so many elements can be read alone.
    With a ``codec`` it is the bytes of several, quantised so, which ``used_bytes`` are in the checkpoint.
    """

    dtype: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    run: int | None = None
    codec: str | None = None
    used_bytes: int = 0

    @property
    def bytes(self) -> int:
        """The size of the tensor in use."""
        return tensor_bytes(self.shape, self.dtype)

    @property
    def origin(self) -> dict[str, Any]:
        """What the index says of where it comes from."""
        entry = {"dtype": self.dtype, "shape": list(self.shape), "sources": list(self.sources)}
        return entry if self.codec is None else {**entry, "codec": self.codec, "unpacked": self.used_bytes}

    @property
    def without_copy(self) -> dict[str, Any]:
        """What the index says where it doesn't shrink."""
        return {**self.origin, "codec": "none"}

    def entry_name(self, name: str) -> str:
        """Return what the index calls it, and its file but for the ending, if it is ``name``."""
        return name if self.run is None else f"{name}.{NAME}"

    def located(self, file: ShardFile, entry: Mapping[str, Any]) -> AtRest | None:
        """Return where it lies in ``file``, of which an index has this ``entry``; null where it can't be so."""
        at: AtRest | None = Extent(file, 0, self.dtype, self.shape)
        if self.run is not None:
            known, elements = entry.get("codec") == NAME, math.prod(self.shape)
            codec = codec_of(self.dtype, elements, entry.get("run"), entry.get("tiles")) if known else None
            at = None if codec is None else codec.located(file, 0, self.shape)
        right = at is not None and rest_bytes(at) == file.size and self.origin.items() <= entry.items()
        return at if right else None


Wanted = Mapping[str, StoredTensor]
"""What is to be in a store, by name."""


class OffloadStore:
    """The store in one folder: what is in it, and adding to it.

    Make one with ``open_store``. Tensors that were put are in the index after ``publish``, and now and then before.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pending: dict[str, Mapping[str, Any]] = {}
        self._pending_bytes = 0

    def find(self, wanted: Wanted, *, full: bool = False) -> dict[str, AtRest | None]:
        """Return where those of the tensors ``wanted`` lie that are there, whole, made just as it says.

        It is null for a packed one of which the index says that it doesn't shrink. Of the blocks a sample is checked,
        with ``full`` all; a file is then held to its state before that.
        """
        index = read_index(self.folder)
        located: dict[str, AtRest | None] = {}
        files: dict[str, SummedFile] = {}
        for name, tensor in wanted.items():
            entry = index.get(tensor.entry_name(name), {})
            file = summed_file(self._path(tensor.entry_name(name)), entry)
            if tensor.run is not None and entry == tensor.without_copy:
                located[name] = None
            elif file is not None and (at := tensor.located(_shard_file(file, full=full), entry)) is not None:
                located[name], files[name] = at, file
        damaged = find_damage(files, full=full)
        for name, damage in list(damaged.items())[:1]:
            others = f", and {len(damaged) - 1} more aren't whole" if len(damaged) > 1 else ""
            _log.warning("%s: %s%s; made again", files[name].path, damage, others)
        return {name: at for name, at in located.items() if name not in damaged}

    def fill(self, wanted: Wanted, add: Callable[[Wanted], object], *, full: bool = False) -> dict[str, AtRest | None]:
        """Return what ``find`` does of all that are ``wanted``, once ``add`` has put there what isn't, or is damaged.

        The store is to be locked meanwhile. One that isn't there even then is a ``StorageError``.
        """
        located = self.find(wanted, full=full)
        absent = {name: tensor for name, tensor in wanted.items() if name not in located}
        if absent:
            add(absent)
            self.publish()
            located |= self.find(absent, full=full)
        for name in (name for name in absent if name not in located):
            raise StorageError(
                f"{self.folder}: {name!r} isn't there as it was written; check the disk, or set offload_folder"
            )
        return located

    def put(self, name: str, tensor: StoredTensor, pieces: Iterable[memoryview]) -> None:
        """Write the bytes of one tensor, piece by piece, to its file, on disk before it takes its name."""
        self._write(name, tensor.origin, pieces)

    def put_packed(self, name: str, tensor: StoredTensor, tiles: Iterable[list[bytes]]) -> None:
        """Write the packed copy of ``tensor``: the frames of its tiles, as they come."""
        lengths: list[list[int]] = []

        def frames() -> Iterator[bytes]:
            for tile in tiles:
                lengths.append(list(map(len, tile)))
                yield from tile

        entry = {**tensor.origin, "codec": NAME, "unpacked": tensor.bytes, "run": tensor.run}
        entry["tiles"] = lengths  # which is full once all is written
        self._write(tensor.entry_name(name), entry, frames())

    def note_plain(self, name: str, tensor: StoredTensor) -> None:
        """Remember that ``tensor`` doesn't shrink."""
        self._pending[tensor.entry_name(name)] = tensor.without_copy

    def _write(self, name: str, entry: Mapping[str, Any], pieces: Iterable[bytes | memoryview]) -> None:
        """Write a file; ``entry`` is what the index says of it, beside its checksums."""
        sums = RunningSums()
        try:
            _make_way(self._path(name))
            write_pieces(self._path(name), map(sums.passed, pieces))
        except OffstageError:
            raise
        except OSError as error:
            raise self._error(f"writing {name!r} ({format_bytes(sums.bytes)})", error) from error
        self._pending[name] = {**entry, "bytes": sums.bytes, "blocks": sums.sums}
        self._pending_bytes += sums.bytes
        if self._pending_bytes >= _PUBLISH_BYTES:
            self.publish()

    def publish(self) -> None:
        """Put what was written since the last time into the index."""
        try:
            if self._pending:
                sync_folder(self.folder)
                _make_way(self.folder / INDEX_NAME)
                add_entries(self.folder, self._pending)
        except OSError as error:
            raise self._error("writing its index", error) from error
        self._pending.clear()
        self._pending_bytes = 0

    def refer(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Put ``entries`` into the index for tensors that lie elsewhere, or in a file of another name."""
        with self.locked():
            self._pending.update(entries)
            self.publish()

    def check_space(self, count: int, needed: int) -> None:
        """Refuse, before anything is written, to put into the folder what its disk has no room for, or can't take.

        That is ``count`` tensors of ``needed`` bytes together.
        """
        try:
            free = shutil.disk_usage(self.folder).free
        except OSError:
            free = needed  # where the disk doesn't tell, writing will show
        if needed > free:
            raise StorageError(
                f"{self.folder}: {count} offloaded tensors need {format_bytes(needed)} ({needed} bytes), and "
                f"{format_bytes(free)} are free; set offload_folder to a folder on a larger disk"
            )
        if count and not os.access(self.folder, os.W_OK):
            raise _unusable(self.folder, "it can't be written", needed)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store's lock, where the file system has locks, so that two jobs don't do the same work."""
        with locked(self.folder / "store", work="fills the offload store"):
            self._sweep()
            yield

    def _sweep(self) -> None:
        """Remove what was left long ago: temporary files of runs that were killed, and what was set aside."""
        for leftover in (*self.folder.glob(f"{TEMPORARY}*"), *self.folder.glob(f"{DAMAGED}*")):
            with suppress(OSError):
                if _is_stale(leftover):
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        with suppress(OSError, OffstageError):  # the store may lie on a disk that can't be written
            if any(map(_is_stale, _additions(self.folder))):
                add_entries(self.folder, {})

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.dat"

    def _error(self, doing: str, error: OSError) -> StorageError:
        return StorageError(
            f"{self.folder}: {doing} failed: {error.strerror or error}; free some space there or set offload_folder "
            "to a folder that can be written"
        )


def open_store(folder: Path, key: str, *, needed_bytes: int = 0, model: str = "") -> OffloadStore:
    """Return the store for ``key`` in ``folder``, made if it isn't there.

    A folder that holds something else keeps it, and the store goes into its subfolder named ``key``; see ``claim``.
    """
    for place in (folder, folder / key):
        store = claim(place, key, needed_bytes=needed_bytes, model=model)
        if store is not None:
            return store
    raise StorageError(f"{place}: holds files of something else; move them away or set another offload_folder")


def claim(folder: Path, key: str, *, needed_bytes: int = 0, model: str = "") -> OffloadStore | None:
    """Return the store for ``key`` in ``folder`` itself, made if nothing is there; null where it holds something else.

    ``needed_bytes`` is how much is to be kept there, for the ``StorageError`` of a folder that can't be used; ``model``
    is the name of what it is of, for whoever lists the cache.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return OffloadStore(folder) if _mark(folder, key, model) else None
    except OSError as error:
        raise _unusable(folder, error.strerror or str(error), needed_bytes) from error


def _unusable(folder: Path, reason: str, needed: int) -> StorageError:
    return StorageError(
        f"{folder}: the offload folder can't be used: {reason}; set offload_folder to a folder that can be written "
        f"and has {format_bytes(needed)} ({needed} bytes) free"
    )


def _mark(folder: Path, key: str, model: str) -> bool:
    """Return whether ``folder`` is the store for ``key``, after marking it so if it is empty."""
    marker = folder / MARKER_NAME
    mark = {"format": FORMAT_VERSION, "key": key, "model": model}
    # A store that is whole may lie on a disk that can't be written; another job's claim in the making is hidden.
    if not marker.exists() and all(item.name.startswith(".") for item in folder.iterdir()):
        with suppress(FileExistsError):
            create_file(marker, json.dumps(mark) + "\n")
    try:
        content = read_json(marker)
    except (FileNotFoundError, NotRegularError, ValueError):
        return False
    return isinstance(content, dict) and (content.get("format"), content.get("key")) == (FORMAT_VERSION, key)


def read_index(folder: Path) -> dict[str, Any]:
    """Return what ``index.json`` in ``folder`` says of each tensor, and what is being added to it.

    What is said of a tensor is a mapping; one of which something else stands there isn't known, and nothing is where no
    index can be read.
    """
    # What is being added first: once the index has it, it may be gone.
    added = {name: entry for path in _additions(folder) for name, entry in _entries(path).items()}
    return _entries(folder / INDEX_NAME) | added


def add_entries(folder: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Put ``entries`` into the index of ``folder``; what others put there meanwhile stays, with locks or without.

    Who adds to an index reads it and writes it anew, and may have read it before another wrote. So each first says what
    it adds in a file of its own, and writes the index again until it has all that is said: who writes last sees the
    files of all before. A file goes once the index has it and no other is there, whose writer may have read an older
    index; otherwise it stays for a day.
    """
    own = folder / f"{_ADDED}{socket.gethostname()}-{os.getpid()}-{threading.get_native_id()}.json"
    replace_file(own, json.dumps({**_entries(own), **entries}))
    while True:
        replace_file(folder / INDEX_NAME, json.dumps(read_index(folder), indent=1) + "\n")
        others = [path for path in _additions(folder) if path != own]
        if not others or read_index(folder) == _entries(folder / INDEX_NAME):
            break
    for path in filter(_is_stale, others) if others else (own,):
        path.unlink(missing_ok=True)


def _additions(folder: Path) -> list[Path]:
    """Return the files in which writers say what they add to the index of ``folder``, the latest last."""
    files: list[Path] = []
    with suppress(OSError), os.scandir(folder) as names:  # of tens of thousands, for a large model: what globs is slow
        files = [folder / entry.name for entry in names if entry.name.startswith(_ADDED)]
    return sorted(files, key=lambda path: _state(path) or 0)


def _entries(path: Path) -> dict[str, Any]:
    return {name: entry for name, entry in read_object(path).items() if isinstance(entry, dict)}


def plain_index(folder: Path) -> dict[str, Any]:
    """Return what ``read_index`` does of those tensors that lie in ``folder`` as they are used."""
    return {name: entry for name, entry in read_index(folder).items() if "codec" not in entry}


def _shard_file(file: SummedFile, *, full: bool) -> ShardFile:
    return ShardFile(file.path.name, file.path, file.size, None, "", _state(file.path) if full else None)


def _is_stale(path: Path) -> bool:
    with suppress(OSError):
        return time.time() - path.stat().st_mtime > _STALE_SECONDS
    return False


def _state(path: Path) -> int | None:
    """Return when ``path`` was last changed, in nanoseconds; null where it is gone."""
    try:
        return path.stat().st_ctime_ns
    except OSError:
        return None


def _make_way(path: Path) -> None:
    """Move a folder away that lies where a file of the store must be."""
    if path.is_dir():
        move_aside(path, "isn't a file")
