"""Housekeeping: what lies in a cache, what may go, what is damaged.

An artifact is taken by renaming its folder away under the exclusive lock of its lease: a run either has the lease
already and keeps what it reads, or finds nothing there and builds again. What several artifacts share (the offload
stores) is taken only while no run works at all.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from offstage.pipeline.cache.block_sums import MARKER_NAME, find_store_damage
from offstage.pipeline.cache.locks import SHARED, lease_path, locked, sole_use
from offstage.pipeline.cache.sealed_files import (
    DAMAGED,
    MANIFEST,
    DamagedError,
    read_sealed,
    verify,
)
from offstage.pipeline.cache.store import BUILDING
from offstage.pipeline.regular_files import read_object
from offstage.pipeline.stage import MEASURED

OFFLOAD = "offload"
"""The folder of the cache that holds the offload stores; they have no manifest, and an index with checksums."""


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One artifact, or one offload store: its size in bytes and when it was last used, in seconds of the epoch.

    ``model`` is what the model goes by that it was made for, empty where that isn't known.
    """

    stage: str
    key: str
    folder: Path
    bytes: int
    used: float
    model: str = ""

    @property
    def lease(self) -> Path:
        """The file whose lock stands for its use."""
        return self.folder.parents[1] / SHARED if self.stage == OFFLOAD else lease_path(self.folder)


def entries(root: Path) -> list[CacheEntry]:
    """Return all that lies in the cache ``root``, least recently used first."""
    folders = [path for path in root.glob("*/*") if path.is_dir() and not path.name.startswith(".")]
    return sorted((entry for folder in folders for entry in _measure(folder)), key=lambda entry: entry.used)


def _measure(folder: Path) -> Iterator[CacheEntry]:
    """Yield the entry of ``folder``; nothing where another process has just taken it."""
    try:
        files = [path.stat() for path in folder.rglob("*") if path.is_file()]
        used = folder.stat().st_mtime
    except FileNotFoundError:
        return
    if folder.parent.name == OFFLOAD:
        used = max([used, *(file.st_mtime for file in files)])
    model = str(read_object(folder / (MARKER_NAME if folder.parent.name == OFFLOAD else MANIFEST)).get("model", ""))
    yield CacheEntry(folder.parent.name, folder.name, folder, sum(file.st_size for file in files), used, model)


def choose(
    entries: Sequence[CacheEntry], *, older_than_seconds: float | None, max_bytes: int | None, now: float | None = None
) -> list[CacheEntry]:
    """Return the entries to prune: those unused for so long, then the least recently used until the rest fits."""
    now = time.time() if now is None else now
    chosen = [entry for entry in entries if older_than_seconds is not None and now - entry.used > older_than_seconds]
    others = [entry for entry in entries if entry not in chosen]
    total = sum(entry.bytes for entry in others)
    for entry in sorted(others, key=lambda entry: entry.used):
        if max_bytes is None or total <= max_bytes:
            break
        chosen.append(entry)
        total -= entry.bytes
    return chosen


def prune(chosen: Sequence[CacheEntry]) -> list[CacheEntry]:
    """Remove the entries that no run uses, and return these."""
    return [entry for entry in chosen if _take(entry)]


def _take(entry: CacheEntry) -> bool:
    """Remove ``entry`` and return whether it is gone; False if a run uses it."""
    aside = entry.folder.with_name(f"{BUILDING}{uuid.uuid4().hex}")
    if not _move(entry, aside, lambda folder: True):
        return False
    shutil.rmtree(aside, ignore_errors=True)  # what is left of it the next run sweeps away
    return True


def _move(entry: CacheEntry, aside: Path, still: Callable[[Path], bool]) -> bool:
    """Rename the folder of ``entry`` to ``aside`` if nobody uses it and ``still`` says so; returns whether it went."""
    with sole_use(entry.lease) as ours:
        if not ours or not still(entry.folder):
            return False
        try:
            entry.folder.rename(aside)
        except FileNotFoundError:
            return False
        return True


def find_damage(entry: CacheEntry) -> str | None:
    """Return what is wrong with an artifact or a store, all of its files hashed again; None if it is whole."""
    if entry.stage == OFFLOAD:
        return find_store_damage(entry.folder)
    try:
        verify(entry.folder, stage=entry.stage, key=entry.key, full=True)
    except DamagedError as damage:
        return str(damage) if entry.folder.exists() else None
    return None


def damaged_figures(root: Path) -> dict[Path, str]:
    """Return what is wrong with each file of what was measured of the machine that isn't as it was written."""
    damaged = {}
    for path in measured_files(root):
        try:
            read_sealed(path)
        except DamagedError as damage:
            damaged[path] = str(damage)
    return damaged


def forget_figures(root: Path) -> list[Path]:
    """Remove what was measured of the machine, and return its files: whoever needs a figure measures it again."""
    forgotten = measured_files(root)
    for path in forgotten:
        with locked(path, work="measures this machine"):  # who measures now writes all that it read, and its own
            path.unlink(missing_ok=True)
    return forgotten


def measured_files(root: Path) -> list[Path]:
    """Return the files in which the cache ``root`` keeps what was measured of the machine."""
    return sorted((root / MEASURED).glob("*.json"))


def set_aside(entry: CacheEntry) -> Path | None:
    """Move a damaged artifact away and return where it lies now; None if a run uses it, or it is gone or mended."""
    aside = entry.folder.with_name(f"{DAMAGED}{uuid.uuid4().hex}")
    moved = _move(entry, aside, lambda folder: folder.exists() and find_damage(entry) is not None)
    if moved:
        aside.touch()  # the sweep counts from now
    return aside if moved else None
