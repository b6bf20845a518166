"""What builds that were killed left, to be gone on with: lines that grew, and sealed files of a folder of their own.

Whoever goes on with a build reads no more of it than is as it was written. What isn't can be found before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from offstage.pipeline.atomic_files import write_whole
from offstage.pipeline.cache.leftovers import BUILDING, move_aside
from offstage.pipeline.cache.locks import Grant, locked
from offstage.pipeline.cache.manifest import DamagedError, verify_listed
from offstage.pipeline.cache.sealed_files import read_sealed, read_sealed_line
from offstage.pipeline.regular_files import NotRegularError, read_regular


def remove_damage(root: Path) -> dict[Path, str]:
    """Return what is wrong with each file that a killed build of the cache ``root`` left; it is gone afterwards.

    What a process works on is left alone.
    """
    found: dict[Path, str] = {}
    for building in sorted(root.glob(f"*/{BUILDING}*")):
        folder = building.with_name(building.name.removeprefix(BUILDING))
        with locked(folder, work=f"verifies {building.parent.name}", wait=False) as grant:
            if grant is not Grant.BUSY:
                found |= dict(_remove(building))
    return found


def _remove(building: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(building.glob(".*/*.json")):
        try:
            content = read_sealed(path)
            listing = content.get("files") if isinstance(content, dict) else None
            verify_listed(path.parent, listing if isinstance(listing, dict) else {}, full=True)
        except DamagedError as damage:
            move_aside(path, damage)
            yield path, str(damage)
    for path in sorted(building.glob("*.jsonl")):
        try:
            lines = read_regular(path).splitlines(keepends=True)
        except NotRegularError:
            continue
        sound = [line for line in lines if _is_sound(line)]
        if len(sound) < len(lines):
            write_whole(path, b"".join(sound))
            yield path, f"{len(lines) - len(sound)} of {len(lines)} lines don't match their checksums"


def _is_sound(line: bytes) -> bool:
    try:
        read_sealed_line(line)
    except DamagedError:
        return False
    return True
