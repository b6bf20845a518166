"""What lies in a cache and says of itself whether it is as it was written: whole artifacts, small files, lines.

An artifact never changes. Its manifest lists its files, and is written after all of them have reached the disk, so a
folder that has one was complete once. What is measured of a machine is added to, by several processes: JSON with its
own hash beside it, in one file, written whole. So is each line of a file that grows by lines. What isn't as it was
written is set aside, and made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import uuid
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

from offstage.pipeline.atomic_files import replace_file, sync_folder
from offstage.pipeline.errors import apart
from offstage.pipeline.regular_files import NotRegularError, open_regular, parse_json, read_json, read_regular
from offstage.pipeline.stage import FileEntry

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
REHASH_BYTES = 16 * 2**20
"""Files up to this size are hashed at every read: a few milliseconds. Of larger ones the size is compared."""
DAMAGED = ".damaged-"
"""How the name begins of what was set aside."""

_log = logging.getLogger("offstage")


class DamagedError(Exception):
    """What lies in the cache isn't what was written there."""


def move_aside(path: Path, damage: object) -> None:
    """Rename what lies at ``path`` in the cache, which ``damage`` tells, so that it is made again; says so once.

    Raises ``OSError`` where the cache can't be written.
    """
    aside = path.with_name(f"{DAMAGED}{uuid.uuid4().hex}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    os.utime(aside, follow_symlinks=False)  # the sweep counts from now: a rename leaves the time as it was
    _log.warning("%s: %s; set aside as %s, to be built again", path, damage, aside.name)


def write_sealed(path: Path, content: Any) -> None:
    """Write ``content``, plain JSON data, to ``path``, over what was there."""
    replace_file(path, json.dumps({"sha256": _digest(content), "content": content}, indent=1) + "\n")


def read_sealed(path: Path) -> Any:
    """Return what was written to ``path``; None where nothing was.

    Raises:
        DamagedError: what lies there isn't what was written.
        OSError: it can't be read.
    """
    try:
        document = read_json(path)
    except FileNotFoundError:
        return None
    except NotRegularError as error:
        raise DamagedError("isn't a file") from error
    except ValueError as error:
        raise DamagedError("isn't JSON") from error
    match document:
        case {"sha256": str(digest), "content": content} if digest == _digest(content):
            return content
    raise DamagedError("doesn't match its hash")


def settle_sealed(path: Path) -> Any:
    """Return what was written to ``path``, as ``read_sealed`` does; what is damaged is set aside, and None returned."""
    try:
        return read_sealed(path)
    except DamagedError as damage:
        move_aside(path, damage)
        return None


def sealed_line(row: Mapping[str, Any]) -> bytes:
    """Return ``row``, plain JSON data, as a line with a checksum of its own in the end."""
    return json.dumps({**row, "crc32": _sum(row)}).encode() + b"\n"


def read_sealed_line(line: bytes) -> dict[str, Any]:
    """Return the row that ``sealed_line`` made ``line`` of; a ``DamagedError`` where it isn't that, to its end."""
    try:
        row = parse_json(line) if line.endswith(b"\n") else None
    except ValueError as error:
        raise DamagedError("isn't JSON") from error
    if not isinstance(row, dict) or row.pop("crc32", None) != _sum(row):
        raise DamagedError("doesn't match its checksum")
    return row


def _sum(row: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(row).encode())


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def seal(folder: Path, *, stage: str, key: str, model: str = "", without: Collection[str] = ()) -> dict[str, FileEntry]:
    """Bring all of ``folder`` to the disk, then write its manifest; returns what the manifest lists.

    ``model`` is what the model goes by that it was made for: for whoever lists the cache, and no part of what is kept.
    What lies in ``folder`` under the names ``without`` isn't listed.

    Raises:
        ValueError: the folder holds a link, or a ``manifest.json`` of its own: the stage that wrote it is
            wrong.
    """
    files: dict[str, FileEntry] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        mode = path.lstat().st_mode
        if path.relative_to(folder).parts[0] in without:
            continue
        if stat.S_ISDIR(mode):
            sync_folder(path)
        elif stat.S_ISREG(mode) and name != MANIFEST:
            files[name] = _measure(path)
        else:
            raise ValueError(f"stage {stage} left {name!r}: an artifact holds plain files, none named {MANIFEST}")
    listing = {name: asdict(entry) for name, entry in files.items()}
    manifest = {"schema_version": SCHEMA_VERSION, "stage": stage, "key": key, "model": model, "files": listing}
    replace_file(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    return files


def verify(folder: Path, *, stage: str, key: str, full: bool = False) -> dict[str, FileEntry]:
    """Return what the manifest of ``folder`` lists, all of it checked; with ``full`` large files are hashed too.

    Raises:
        DamagedError: the manifest is missing, malformed or another artifact's, or a file isn't as it says.
    """
    with _damage_of_files():
        listing = _parse(read_regular(folder / MANIFEST), stage=stage, key=key)
    return verify_listed(folder, listing, full=full)


def verify_listed(folder: Path, listing: Mapping[str, object], *, full: bool = False) -> dict[str, FileEntry]:
    """Return what ``listing`` says of files of ``folder``, each checked: name → its size and SHA-256, as JSON has them.

    Raises ``DamagedError`` as ``verify`` does.
    """
    files = {name: _entry(name, value) for name, value in listing.items()}
    with _damage_of_files():
        for name, entry in files.items():
            _compare(folder / name, name, entry, full=full)
    return files


@contextmanager
def _damage_of_files() -> Iterator[None]:
    """Turn what tells that a file isn't there, or is something else, into a ``DamagedError``."""
    try:
        yield
    except NotRegularError as error:
        raise DamagedError(f"{Path(str(error.filename)).name} isn't a file") from apart(error)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedError(f"{Path(str(error.filename)).name} is missing") from apart(error)


def _measure(path: Path) -> FileEntry:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(size=os.fstat(file.fileno()).st_size, sha256=digest)


def _parse(manifest: bytes, *, stage: str, key: str) -> dict[str, object]:
    try:
        data = parse_json(manifest)
    except ValueError as error:
        raise DamagedError(f"{MANIFEST} isn't JSON") from error
    match data:
        case {"schema_version": int(version), "stage": str(named), "key": str(keyed), "files": dict(files)}:
            if (version, named, keyed) != (SCHEMA_VERSION, stage, key):
                raise DamagedError(f"{MANIFEST} is of version {version}, stage {named}, key {keyed}")
            return files
        case _:
            raise DamagedError(f"{MANIFEST} lacks a field")


def _entry(name: str, value: object) -> FileEntry:
    pure = PurePosixPath(name)
    inside = not pure.is_absolute() and ".." not in pure.parts
    match value:
        case {"size": int(size), "sha256": str(sha256)} if inside:
            return FileEntry(size=size, sha256=sha256)
        case _:
            raise DamagedError(f"there is a wrong entry for {name!r}")


def _compare(path: Path, name: str, entry: FileEntry, *, full: bool) -> None:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise DamagedError(f"{name} isn't a file")
    if status.st_size != entry.size:
        raise DamagedError(f"{name} has {status.st_size} bytes instead of {entry.size}")
    if entry.size > REHASH_BYTES and not full:
        return
    with os.fdopen(open_regular(path), "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
            raise DamagedError(f"{name} doesn't match its hash")
