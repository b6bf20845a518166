"""Files that are whole or not there: how the cache and the run record write.

A file written here survives a kill and a power cut as it was before or as it is after, never in between. What
goes wrong with a disk is a ``StorageError`` that names the folder and says what to do.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from offstage.pipeline.errors import OffstageError, StorageError, apart, named

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_LEAVE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_IN_THE_WAY = frozenset({errno.ENOTDIR, errno.EEXIST, errno.EISDIR})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_ADVICE: Mapping[frozenset[int], str] = {
    _NO_SPACE: "free some space there, or set outputs to a folder on another disk",
    _NO_LEAVE: "change its permissions, or set outputs to a folder that you may write to",
    _IN_THE_WAY: "a file lies where a folder must be: move it away, or set outputs to another folder",
    frozenset({errno.EMFILE, errno.ENFILE}): "let the process open more files (ulimit -n), and run again",
    frozenset({errno.ENOMEM}): "have the run hold less: lower max_memory.cpu, or set storage.io=direct",
}
_OTHERWISE = "check the disk and run again, or set outputs to a folder on another disk"

TEMPORARY = ".tmp-"
"""How the name begins of what isn't whole yet: what was left by a process that was killed is found by it."""


def storage_error(folder: Path, error: OSError) -> StorageError:
    """Return ``error`` as one that names ``folder`` and the next step."""
    advice = next((advice for numbers, advice in _ADVICE.items() if error.errno in numbers), _OTHERWISE)
    return StorageError(f"{folder}: {error.strerror or error}; {advice}")


@contextmanager
def mendable(folder: Path | None = None) -> Iterator[None]:
    """Turn every ``OSError`` of the block into a ``StorageError`` about ``folder``, or about what the error names."""
    try:
        yield
    except (OffstageError, BrokenPipeError):
        raise
    except OSError as error:
        raise storage_error(folder or Path(os.fsdecode(error.filename or "a file")), error) from apart(error)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` survive a power cut, where its file system can promise that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
    finally:
        os.close(descriptor)


def replace_file(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, over what was there: a reader sees the old file or the new one, whole."""
    write_whole(path, text.encode())
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` in a folder that is published whole later; an ``OSError`` names the file."""
    with named(path):
        path.write_text(text)


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Write ``data`` to ``path`` as ``replace_file`` does; its name survives a power cut after ``sync_folder``."""
    write_pieces(path, [data])


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write ``pieces`` to ``path``, one after the other as they come, as ``write_whole`` does.

    What goes wrong while they are made leaves what was there.
    """
    _write_beside(path, pieces, lambda written: os.replace(written, path))  # noqa: PTH105


def create_file(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, which must not exist; of several that try at once, one succeeds.

    Raises:
        FileExistsError: something of that name is there already; it is left as it is.
    """
    _write_beside(path, [text.encode()], lambda written: _link(written, path))
    try:
        sync_folder(path.parent)
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise


def _write_beside(path: Path, pieces: Iterable[bytes | memoryview], publish: Callable[[Path], None]) -> None:
    written = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    try:
        with named(path), written.open("xb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        publish(written)
    finally:
        with suppress(OSError):  # published or not, what can't be removed is only in the way
            written.unlink(missing_ok=True)


def _link(written: Path, path: Path) -> None:
    """Give ``written`` the name ``path`` if that is free: a link is made whole, and never over a file."""
    try:
        path.hardlink_to(written)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        path.touch(exist_ok=False)
        written.replace(path)
