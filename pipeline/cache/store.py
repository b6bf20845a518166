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
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pipeline.atomic_files import TEMPORARY, mendable, storage_error, sync_folder
from pipeline.cache.leases import SHARED, Leases, lease_path
from pipeline.cache.leftovers import BUILDING, move_aside, remove_leftovers
from pipeline.cache.locks import locked
from pipeline.cache.manifest import MANIFEST, DamagedError, seal, verify
from pipeline.errors import OffstageError, StorageError
from pipeline.stage import Artifact

T = TypeVar("T")

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
                return _used(_read(folder))
            except DamagedError:
                # Judged again under the lock, so that what another process has mended meanwhile is left
                # alone; and if another holds the lock, it is mending now.
                with locked(folder, work=f"builds {stage}", wait=False) as ours:
                    return _settle(folder) if ours else None

    def obtain(
        self, stage: str, key: str, write: Callable[[Path], T], *, resumes: bool = False
    ) -> tuple[Artifact, T | None, bool]:
        """Return the artifact of ``key``, what ``write`` returned, and whether the artifact was there before.

        ``write`` is called with an empty folder to fill, and only if no artifact is found; else its part is
        None. The folder is renamed afterwards, so what ``write`` returns must not depend on where it lies.
        Whatever ``write`` raises leaves nothing behind; but where it ``resumes``, the folder is what the last one that
        was killed, or raised, left of the same key, until ``sweep`` takes it.
        """
        folder = self._folder(stage, key)
        found = self.find(stage, key)
        if found is not None:
            return found, None, True
        with mendable(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
        self._leases.hold(lease_path(folder))
        self._leases.hold(self._root / SHARED)
        with locked(folder, work=f"builds {stage}"):
            with mendable(folder.parent):
                found = _settle(folder)
            if found is not None:
                return found, None, True
            artifact, made = _build(folder, write, resumes=resumes, model=self._model)
            return artifact, made, False

    def sweep(self, *, older_than_seconds: float = 86400.0) -> None:
        """Remove what killed processes left, what was set aside, and idle locks, all by their newest file.

        What can't be removed stays: a sweep never fails a run.
        """
        remove_leftovers(self._root, unused_since=time.time() - older_than_seconds)

    def _folder(self, stage: str, key: str) -> Path:
        for part in (stage, key):
            if not part or part.startswith(".") or "/" in part or os.sep in part:
                raise ValueError(f"{part!r} can't name a folder of the cache")
        return self._root / stage / key


def _read(folder: Path) -> Artifact | None:
    """Return the artifact in ``folder``, None if there is no such folder; raises ``DamagedError``."""
    try:
        folder.lstat()
    except FileNotFoundError:
        return None
    stage, key = folder.parent.name, folder.name
    return Artifact(stage=stage, key=key, folder=folder, files=verify(folder, stage=stage, key=key))


def _used(artifact: Artifact | None) -> Artifact | None:
    """Note on the folder that its artifact is used now: the pruner goes by that time."""
    if artifact is not None:
        with suppress(OSError):
            os.utime(artifact.folder)
    return artifact


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


def _build(folder: Path, write: Callable[[Path], T], *, resumes: bool, model: str) -> tuple[Artifact, T]:
    building = folder.with_name(f"{BUILDING}{folder.name if resumes else uuid.uuid4().hex}")
    published = False
    try:
        with mendable(folder.parent):
            building.mkdir(exist_ok=resumes)
            _forget_publishing(building)
        made = _write(building, write)
        with mendable(folder.parent):
            artifact, published = _publish(building, folder, model), True
            return artifact, made
    finally:
        if published or not resumes:
            shutil.rmtree(building, ignore_errors=True)
        else:
            with suppress(OSError):
                building.rmdir()  # there is nothing to go on with


def _forget_publishing(building: Path) -> None:
    """Remove what a build that got as far as its publishing left in ``building``: the manifest, files half-written."""
    for path in building.iterdir():
        if path.name == MANIFEST or path.name.startswith(TEMPORARY):
            path.unlink()


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


def _publish(building: Path, folder: Path, model: str) -> Artifact:
    """Rename ``building`` to ``folder``, or return the artifact of the process that was faster."""
    stage, key = folder.parent.name, folder.name
    files = seal(building, stage=stage, key=key, model=model)
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
