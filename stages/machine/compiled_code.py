"""Loops in C, compiled for this processor by the system's own compiler, once, and kept for the user.

Where bytes are to be unpacked as fast as they are read, operators one after the other take too long: each goes through
memory again, and asks for Python's lock. A loop in C goes through it once, without the lock. No package has to be
installed for it, and nothing is held in memory but its few KB of code. Where there is no compiler, or nothing can be
kept, the operators do the work: the bits are the same.

Compiling takes a second or two and some 60 MB for a compiler's process; so it is done where a run plans, before any
weight is there, and never where weights are unpacked. What was compiled lies in a folder that nobody else may write to.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import shutil
import stat
import subprocess
import sys
import uuid
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

from pipeline.atomic_files import TEMPORARY
from pipeline.cache.user_cache import user_cache
from stages.machine.kernels import processor_features

FOLDER = "code"
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = (
    "-O3", "-march=native", "-std=c11", "-fPIC", "-shared",
    "-fno-fast-math", "-ffp-contract=off", "-fno-trapping-math",
)  # fmt: skip
"""The last ones have each operation rounded as it is written, whatever ``$CC`` says, and traps not be waited for.
"""
_SECONDS = 120
_PLACED_BY = ("XDG_CACHE_HOME", "HOME")
"""What of the environment tells where a user's files are kept."""

_in_use: dict[Path, ctypes.CDLL | None] = {}
"""What was found fit and opened, by where it lies: this process goes on with that, whatever comes to lie there."""

_log = logging.getLogger("offstage")


def build(source: Path) -> None:
    """Have ``source`` compiled and kept, unless it is; what stands in the way is told, and nothing is kept."""
    path = _place(source)
    if path is None or _is_own(path):
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_own(path.parent):
            _compile(source, path)
    except (OSError, subprocess.SubprocessError) as error:
        _log.info("%s: isn't compiled (%s); weights are unpacked by operators, which takes longer", source.name, error)


def load(source: Path) -> ctypes.CDLL | None:
    """Return what was built of ``source``; null where nothing was, or it can't be used."""
    path = _place(source)
    if path is not None and path not in _in_use and _is_own(path.parent) and _is_own(path):
        _in_use[path] = _opened(path)
    return None if path is None else _in_use.get(path)


@cache
def identity(source: Path) -> str:
    """Return what compiled code hangs on, as a hash: a home may be shared by machines of several kinds."""
    known = "\n".join([source.read_text(encoding="utf-8"), *_FLAGS, sys.platform, processor_features()])
    return sha256(known.encode()).hexdigest()[:16]


def _compile(source: Path, path: Path) -> None:
    """Compile ``source`` to ``path``: there is a whole file of that name, or none."""
    compiler = _compiler()
    if compiler is None:
        return
    _log.info("compiles what unpacks weights, once for this processor: a second or two")
    made = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    try:
        command = [*compiler, *_FLAGS, "-o", str(made), str(source)]
        subprocess.run(
            command, check=True, timeout=_SECONDS,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        made.chmod(0o700)  # the linker goes by the umask
        made.replace(path)
    finally:
        with suppress(OSError):
            made.unlink(missing_ok=True)


def _compiler() -> list[str] | None:
    """Return the command of the compiler that ``$CC`` names, or of the first that is installed."""
    with suppress(ValueError):  # a quote that isn't closed
        named = shlex.split(os.environ.get("CC", ""))
        if named:
            return named
    return next(([path] for name in _COMPILERS if (path := shutil.which(name))), None)


def _place(source: Path) -> Path | None:
    """Return where what is compiled of ``source`` is kept; null where there is no place for it."""
    return _place_for(source, tuple(map(os.environ.get, _PLACED_BY)))


@cache  # it is asked for each block that is unpacked
def _place_for(source: Path, _environment: tuple[str | None, ...]) -> Path | None:
    if sys.platform == "win32" or sys.byteorder != "little":
        return None
    try:
        return user_cache() / FOLDER / f"{source.stem}-{identity(source)}.so"
    except RuntimeError:  # a user without a home
        return None


def _is_own(path: Path) -> bool:
    """Return whether ``path`` is there, and nobody but its owner, who runs this, may write to it."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return (
        status.st_uid == os.geteuid()
        and not stat.S_ISLNK(status.st_mode)
        and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def _opened(path: Path) -> ctypes.CDLL | None:
    """Return the library at ``path``; null where the system doesn't run code from there."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None
