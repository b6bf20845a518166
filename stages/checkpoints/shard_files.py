"""Which files a checkpoint may consist of, and opening them.

A checkpoint often comes from a stranger. Nothing outside its folder is read because a name in it says so,
nothing that isn't a regular file is opened (a FIFO would hang the run), and a shard that changes between
two reads is noticed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offstage.pipeline.errors import CheckpointError, StorageError
from offstage.pipeline.regular_files import NotRegularError, open_regular

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model")
"""The files of a checkpoint folder that show that it has a tokenizer, as glob patterns."""
TOKENIZER_TEXTS = (*TOKENIZER_FILES, "*.jinja", "*.tiktoken", "*.spm", "*.codes")
"""Of what one tokenizer or another is made."""
TEXTS = (*TOKENIZER_TEXTS, "*.json", "*.txt")
"""The files beside weights and code that a model, its tokenizer and its default options are made from."""
SMALL_FILES = (*TEXTS, "*.py")
"""All that a checkpoint has beside its weights."""
_SHA256_LETTERS, _HEX = 64, frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file of a checkpoint as it was when the checkpoint was opened.

    ``size`` is in bytes, ``mtime_ns`` in nanoseconds (null: not held to it); ``digest`` is the SHA-256 in
    hex of its header (safetensors) or of its table of contents (``.bin``), which changes with any of its
    tensors' names, shapes or places. ``changed_ns`` is when the file's inode was last changed (ctime, null: not held to
    it), which nobody can set back.
    """

    name: str
    path: Path
    size: int
    mtime_ns: int | None
    digest: str
    changed_ns: int | None = None


def is_plain_name(name: str) -> bool:
    """Return whether ``name`` can be a file's in a folder, and leads nowhere else. Lone surrogates are no text."""
    is_text = name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in name)
    return is_text and name not in ("", ".", "..") and not any(mark in name for mark in ("/", "\\", "\0"))


def locate(folder: Path, name: str, *, allow_links: bool = False) -> Path:
    """Return where the file ``name`` of the checkpoint ``folder`` lies, or raise a ``CheckpointError``.

    ``name`` must be a plain file name and the file a regular one that holds something. A symbolic link that
    leaves the folder is refused unless ``allow_links`` says otherwise or it is a Hub cache's own, from a
    snapshot to its blobs.
    """
    if not is_plain_name(name):
        raise CheckpointError(f"{folder}: {name!r} is not a plain file name; shards lie in the checkpoint's own folder")
    path = folder / name
    check_regular(path)
    real, home = path.resolve(), folder.resolve()
    if real.parent != home and not allow_links and not _is_hub_blob(real, home):
        raise CheckpointError(
            f"{path}: a symbolic link that leaves the folder; set model.allow_links=true to follow it"
        )
    return path


def check_texts(folder: Path) -> None:
    """Refuse a checkpoint ``folder`` in which something that libraries open by its name would hold them up.

    That is a FIFO, a socket or a device in the place of a config or of a tokenizer's file: whoever opens one waits.
    """
    for path in sorted({path for pattern in SMALL_FILES for path in folder.glob(pattern)}):
        if _would_hang(path) and not path.name.endswith(".index.json"):  # an index is checked as it is opened
            raise CheckpointError(f"{path}: not a regular file; remove it, or get it again")


def _would_hang(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False  # a link to nothing: whoever needs it says so
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def check_regular(path: Path) -> os.stat_result:
    """Return the status of the regular file ``path``; anything else is a ``CheckpointError``."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; complete the checkpoint (download it again?)") from None
    except ValueError as error:
        raise CheckpointError(f"{str(path)!r}: no name that a file can have; get the files again") from error
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: not a regular file; a shard must be one")
    if not status.st_size:
        raise CheckpointError(f"{path}: an empty file; its download or its saving was cut short, get it again")
    return status


def open_file(path: Path) -> int:
    """Open the regular file ``path`` for reading and return its descriptor."""
    check_regular(path)
    try:
        return open_regular(path)
    except NotRegularError as error:
        raise CheckpointError(f"{path}: not a regular file; a shard must be one") from error
    except OSError as error:
        raise StorageError(f"{path}: can't be opened: {error.strerror}") from error


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open the regular file ``path`` for reading and lend its descriptor."""
    descriptor = open_file(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def opened_shard(file: ShardFile) -> Iterator[int]:
    """Open ``file`` and lend its descriptor; a ``CheckpointError`` if it changed since it was recorded."""
    with opened(file.path) as descriptor:
        check_unchanged(file, descriptor)
        yield descriptor


def check_unchanged(file: ShardFile, descriptor: int) -> None:
    """Raise a ``CheckpointError`` if ``file``, open as ``descriptor``, changed since it was recorded."""
    status = os.fstat(descriptor)
    moved = file.mtime_ns not in (None, status.st_mtime_ns) or file.changed_ns not in (None, status.st_ctime_ns)
    if status.st_size != file.size or moved:
        raise CheckpointError(f"{file.path}: the file changed while it was being served; run again")


def read_into(descriptor: int, target: memoryview, *, offset: int, path: Path) -> None:
    """Fill ``target`` (bytes) with what lies at ``offset`` of the open file ``path``."""
    done = 0
    while done < len(target):
        try:
            count = os.preadv(descriptor, [target[done:]], offset + done)
        except OSError as error:
            raise StorageError(f"{path}: reading at byte {offset + done} failed: {error.strerror}") from error
        if not count:
            # Whoever reads knows the file's size from when it was opened: a shorter one was cut since.
            where = f"it ends at byte {offset + done}, inside what was read"
            raise CheckpointError(f"{path}: the file changed while it was being served ({where}); get the file again")
        done += count


def read_at(descriptor: int, offset: int, length: int, path: Path) -> bytearray:
    """Return so many bytes at ``offset`` of the open file ``path``."""
    data = bytearray(length)
    read_into(descriptor, memoryview(data), offset=offset, path=path)
    return data


def hub_digest(path: Path) -> str | None:
    """Return the SHA-256 that the Hub names the large file ``path`` by, where it is a link in the Hub's own cache.

    That is ``models--ORG--NAME/snapshots/COMMIT/FILE``, a link to ``models--ORG--NAME/blobs/SHA256``; null for all
    else, small files too, which the Hub names by another hash. It is what the Hub says, and no byte is read for it.
    """
    real = path.resolve()
    is_named = len(real.name) == _SHA256_LETTERS and all(letter in _HEX for letter in real.name)
    return real.name if is_named and path.is_symlink() and _is_hub_blob(real, path.parent.resolve()) else None


def hub_place(path: Path) -> tuple[str, str] | None:
    """Return the Hub's id and the commit of the file ``path``, where it lies in a snapshot of the Hub's own cache."""
    snapshot = path.parent
    kind, *parts = snapshot.parent.parent.name.split("--")
    if snapshot.parent.name != "snapshots" or kind != "models" or not parts:
        return None
    return "/".join(parts), snapshot.name


def _is_hub_blob(real: Path, home: Path) -> bool:
    return home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
