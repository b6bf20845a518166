"""An artifact's manifest: the list of its files, by which a reader sees that all of them are there and whole.

It is written after every other file of the artifact has reached the disk, so a folder that has one was
complete once.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path, PurePosixPath

from offstage.pipeline.atomic_files import replace_file, sync_folder
from offstage.pipeline.regular_files import NotRegularError, open_regular, parse_json, read_regular
from offstage.pipeline.stage import FileEntry

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
REHASH_BYTES = 16 * 2**20
"""Files up to this size are hashed at every read: a few milliseconds. Of larger ones the size is compared."""


class DamagedError(Exception):
    """A folder of the cache doesn't hold what its manifest says."""


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
        raise DamagedError(f"{Path(str(error.filename)).name} isn't a file") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedError(f"{Path(str(error.filename)).name} is missing") from error


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
