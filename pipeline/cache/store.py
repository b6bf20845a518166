"""The store of artifacts, shared by every process that uses its folder.

An artifact is built in a folder of its own beside its place, brought to the disk, and renamed into place: the
rename is atomic, so a reader finds the whole artifact or none, whatever was killed when. Of several that
build one key, the first to rename wins and the others take its artifact. A lock lets them wait instead of
doing the same work; some file systems grant it to all or to none, so nothing but time depends on it.

    ROOT/STAGE/KEY/            an artifact: its files and ``manifest.json``
    ROOT/STAGE/.tmp-*          one being built, or left by a process that was killed
    ROOT/STAGE/.damaged-*      one that didn't match its manifest
    ROOT/STAGE/.KEY.lock       the lock of a key
    ROOT/STAGE/.KEY.use.lock   the lease of a key: held by every run that uses its artifact
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TypeVar

from offstage.pipeline.atomic_files import TEMPORARY, mendable, storage_error, sync_folder
from offstage.pipeline.cache.locks import LOCK, SHARED, Grant, Leases, lease_path, locked, sole_use
from offstage.pipeline.cache.sealed_files import DAMAGED, MANIFEST, DamagedError, move_aside, seal, verify
from offstage.pipeline.errors import OffstageError, StorageError
from offstage.pipeline.stage import Artifact, FileEntry

T = TypeVar("T")

BUILDING = TEMPORARY
"""How the name begins of an artifact that is being built or removed, or was when its process was killed."""

_TAKEN = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_PUBLISH_ATTEMPTS = 5


class Store:
    """Artifacts under one folder, by stage and key; ``model`` is the name of that for which new ones are made.

    Every method may raise ``StorageError`` for what the disk refuses: no space, no permission, a file in the
    way.
    """

    def __init__(self, root: Path, *, model: str = "") -> None:
        self._root, self._model = root, model
        self._leases = Leases()

    def release(self) -> None:
        """End this run's leases: what it used may be pruned from now on."""
        self._leases.release()

    def find(self, stage: str, key: str) -> Artifact | None:
        """Return the artifact of ``key``, its files checked against the manifest, or None if there is none.

        It isn't pruned before ``release``.
        One that is damaged is set aside with a warning, and None returned: it will be built again.
        """
        folder = self._folder(stage, key)
        self._leases.hold(lease_path(folder))
        with mendable(folder.parent):
            try:
                return _read(folder)
            except DamagedError:
                # Judged again under the lock, so that what another process has mended meanwhile is left
                # alone; and if another holds the lock, it is mending now.
                with locked(folder, work=f"builds {stage}", wait=False) as grant:
                    return _settle(folder) if grant is not Grant.BUSY else None

    def obtain(
        self, stage: str, key: str, write: Callable[[Path], T], *, resumes: Collection[str] = ()
    ) -> tuple[Artifact, T | None, bool]:
        """Return the artifact of ``key``, what ``write`` returned, and whether the artifact was there before.

        ``write`` is called with an empty folder to fill, and only if no artifact is found; else its part is
        None. The folder is renamed afterwards, so what ``write`` returns must not depend on where it lies.
        Whatever ``write`` raises leaves nothing behind; but where it ``resumes``, the folder has what the last one that
        was killed, or raised, left of the same key under these names, until ``sweep`` takes it, if there are locks to
        tell that nobody is at it. They are of files; those that begin with a dot, of folders, are the build's own:
        there until it is on the disk, never published.
        """
        folder = self._folder(stage, key)
        artifact = self.find(stage, key)
        if artifact is not None:
            return artifact, None, True
        with mendable(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
        self._leases.hold(lease_path(folder))
        self._leases.hold(self._root / SHARED)
        with locked(folder, work=f"builds {stage}") as grant:
            with mendable(folder.parent):
                artifact = _settle(folder)
            if artifact is not None:
                return artifact, None, True
            alone = grant is Grant.HELD
            return _build(folder, write, resumes=resumes, alone=alone, model=self._model)

    def sweep(self, *, older_than_seconds: float = 86400.0) -> None:
        """Remove what killed processes left, what was set aside, and idle locks, all by their newest file.

        What can't be removed stays: a sweep never fails a run.
        """
        unused_since = time.time() - older_than_seconds
        leftovers: list[Path] = []
        with suppress(OSError):
            leftovers = sorted(self._root.glob("*/.*"))
        for path in leftovers:
            with suppress(OSError):
                if not path.name.startswith((BUILDING, DAMAGED)) and not path.name.endswith(LOCK):
                    continue
                if max(each.lstat().st_mtime for each in (path, *path.rglob("*"))) <= unused_since:
                    _sweep(path)

    def _folder(self, stage: str, key: str) -> Path:
        for part in (stage, key):
            if not part or part.startswith(".") or "/" in part or os.sep in part:
                raise ValueError(f"{part!r} can't name a folder of the cache")
        return self._root / stage / key


def _sweep(path: Path) -> None:
    if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path, ignore_errors=True)
    elif path.name.endswith(LOCK):
        with sole_use(path):  # it is gone then; one that is held stays
            pass
    else:
        path.unlink()


def _read(folder: Path) -> Artifact | None:
    """Return the artifact in ``folder``, None if there is no such folder; raises ``DamagedError``."""
    try:
        folder.lstat()
    except FileNotFoundError:
        return None
    stage, key = folder.parent.name, folder.name
    files = verify(folder, stage=stage, key=key)
    with suppress(OSError):
        os.utime(folder)  # the pruner goes by when it was last used
    return Artifact(stage=stage, key=key, folder=folder, files=files)


def _settle(folder: Path) -> Artifact | None:
    """Return the artifact of ``folder``; a damaged one is set aside and None returned."""
    judged = _inode(folder)
    try:
        return _read(folder)
    except DamagedError as damage:
        # Where locks don't work, another process may have put a good one in its place since.
        if _inode(folder) == judged:
            move_aside(folder, damage)
        return None


def _inode(folder: Path) -> int | None:
    try:
        return folder.lstat().st_ino
    except FileNotFoundError:
        return None


def _build(
    folder: Path, write: Callable[[Path], T], *, resumes: Collection[str], alone: bool, model: str
) -> tuple[Artifact, T | None, bool]:
    """Build the artifact. One that ``resumes`` goes on only where nobody else can be at it: it is ``alone``."""
    goes_on = alone and bool(resumes)
    building = folder.with_name(f"{BUILDING}{folder.name if goes_on else uuid.uuid4().hex}")
    published, result = False, None
    try:
        with mendable(folder.parent):
            building.mkdir(exist_ok=goes_on)
            files = _sealed(building, folder)
            whole = files is not None
            if files is None:
                _clear(building, lambda path: path.name in resumes and _is_as_resumed(path))
        if files is None:
            result = _write(building, write)
        with mendable(folder.parent):
            own = [name for name in resumes if name.startswith(".")]
            files = files or seal(building, stage=folder.parent.name, key=folder.name, model=model, without=own)
            listed = {MANIFEST, *(PurePosixPath(name).parts[0] for name in files)}
            _clear(building, lambda path: path.name in listed)
            artifact, published = _publish(building, folder, files), True
            return artifact, result, whole
    finally:
        if published or not goes_on:
            shutil.rmtree(building, ignore_errors=True)
        else:
            with suppress(OSError):
                building.rmdir()  # there is nothing to go on with


def _sealed(building: Path, folder: Path) -> dict[str, FileEntry] | None:
    """Return what the manifest of ``building`` lists, if all of it is there: it was killed as it was published."""
    with suppress(DamagedError):
        return verify(building, stage=folder.parent.name, key=folder.name, full=True)
    return None


def _clear(building: Path, stays: Callable[[Path], bool]) -> None:
    """Remove from ``building`` what ``stays`` says no of: what a build that was killed left, what isn't published."""
    for path in building.iterdir():
        if not stays(path):
            shutil.rmtree(path) if stat.S_ISDIR(path.lstat().st_mode) else path.unlink()


def _is_as_resumed(path: Path) -> bool:
    """Return whether ``path`` is of the kind that a build goes on with: a file, or a folder of its own."""
    is_right = stat.S_ISDIR if path.name.startswith(".") else stat.S_ISREG
    return is_right(path.lstat().st_mode)


def _write(building: Path, write: Callable[[Path], T]) -> T:
    """Call ``write``; an ``OSError`` about the cache becomes a ``StorageError``, any other passes."""
    try:
        return write(building)
    except OffstageError:
        raise
    except OSError as error:
        ours = error.errno in _FULL or str(error.filename).startswith(str(building))
        if not ours:
            raise
        raise storage_error(building.parent, error) from error


def _publish(building: Path, folder: Path, files: Mapping[str, FileEntry]) -> Artifact:
    """Rename ``building``, which is sealed, to ``folder``, or return the artifact of the process that was faster."""
    stage, key = folder.parent.name, folder.name
    for _ in range(_PUBLISH_ATTEMPTS):
        try:
            building.rename(folder)
            sync_folder(folder.parent)
            return Artifact(stage=stage, key=key, folder=folder, files=files)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
        winner = _settle(folder)
        if winner is not None:
            return winner
    raise StorageError(f"{folder}: other processes keep leaving damaged artifacts here; check the disk and run again")
