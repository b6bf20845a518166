"""Commands that read their storage at a limited rate: a block-io cgroup of version 1 or 2, made for one command.

Direct reads obey it, and those that fill the page cache too, mapped ones among them, since the process that asks for
the page asks for the block. What a command writes is limited likewise where it goes past the page cache; dirty pages
that the kernel writes later are nobody's in version 1. The kernel counts over slices of a tenth of a second, so that a
short read may be faster.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

Enter = Callable[[Sequence[str]], list[str]]
"""Makes of a command one that runs inside the group from its first instruction."""

_V1, _V2 = Path("/sys/fs/cgroup/blkio"), Path("/sys/fs/cgroup")
_DEVICES = Path("/sys/dev/block")


class ThrottleError(Exception):
    """The storage can't be limited here; the message says why."""


@contextmanager
def throttled(folder: Path, bytes_per_second: int | None) -> Iterator[Enter]:
    """Lend a way to run commands that read the disk of ``folder`` at ``bytes_per_second`` at most; null: as it is.

    Raises a ``ThrottleError`` where there is no such cgroup for this process, or the folder lies on no disk of its own.
    """
    if bytes_per_second is None:
        yield list
        return
    disk = disk_of(folder)
    group = (_V1 if (_V1 / "blkio.throttle.read_bps_device").exists() else _V2) / f"offstage-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as error:
        raise ThrottleError(f"{group}: {error.strerror}") from error
    try:
        _limit(group, disk, bytes_per_second)
        yield lambda command: ["/bin/sh", "-c", 'echo 0 > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]
    finally:
        _remove(group)


def disk_of(folder: Path) -> str:
    """Return the disk that ``folder`` lies on, as ``MAJOR:MINOR``: of a partition the whole one, which is limited."""
    number = folder.stat().st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    place = _DEVICES / name
    if not place.exists():
        raise ThrottleError(f"{folder} lies on no disk ({name}), so that its reads can't be limited")
    if (place / "partition").exists():
        return (place.resolve().parent / "dev").read_text().strip()
    return name


def limit_files(group: Path) -> Mapping[str, str]:
    """Return the files of ``group`` that limit it, with how each is written: of the disk and its bytes a second."""
    if group.parent == _V1:
        return {f"blkio.throttle.{way}_bps_device": "{disk} {rate}" for way in ("read", "write")}
    return {"io.max": "{disk} rbps={rate} wbps={rate}"}


def _limit(group: Path, disk: str, rate: int) -> None:
    try:
        for name, shape in limit_files(group).items():
            group.joinpath(name).write_text(shape.format(disk=disk, rate=rate))
    except OSError as error:
        raise ThrottleError(f"{group}: {error.strerror}") from error


def _remove(group: Path) -> None:
    """Remove the group once what ran in it has been reaped."""
    for _ in range(50):
        try:
            return group.rmdir()
        except OSError:
            time.sleep(0.1)
    return group.rmdir()
