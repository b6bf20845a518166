"""Loops in C, compiled for this processor by the system's own compiler, once, and kept for the user.

Where bytes are to be unpacked as fast as they are read, operators one after the other take too long: each goes through
memory again, and asks for Python's lock. A loop in C goes through it once, without the lock. No package has to be
installed for it, and nothing is held in memory but its few KB of code. Where there is no compiler, or nothing can be
kept, the operators do the work: the bits are the same.

Compiling takes some seconds and 200 MB for a compiler's process; so it is done where a run plans, before any weight is
there, and never where weights are unpacked. It can begin beside a run's imports. What was compiled is an artifact of
the user's cache, in a folder that nobody else may write to: what isn't as it was written is compiled anew, and what is
loaded is what was checked.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, partial
from hashlib import sha256
from pathlib import Path

from offstage.pipeline.cache import user_cache
from offstage.pipeline.cache.sealed_files import DamagedError, move_aside, verify
from offstage.pipeline.cache.store import Store
from offstage.pipeline.errors import OffstageError
from offstage.stages.machine.kernels import processor_features
from offstage.stages.machine.own_process import begun, has_room
from offstage.stages.machine.private_folders import is_private, make_private, require_private

FOLDER = "code"
LIBRARY = "library.so"
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = (
    "-O3", "-march=native", "-std=c11", "-fPIC", "-shared",
    "-fno-fast-math", "-ffp-contract=off", "-fno-trapping-math",
)  # fmt: skip
"""The last ones have each operation rounded as it is written, whatever ``$CC`` says, and traps not be waited for.
"""
_SECONDS = 120
_COMPILER_BYTES = 200 * 10**6
_PLACED_BY = ("XDG_CACHE_HOME", "HOME")
"""What of the environment tells where a user's files are kept."""

_in_use: dict[Path, ctypes.CDLL | None] = {}
"""What was found fit and opened, by where it lies: this process goes on with that, whatever comes to lie there."""

_begun: dict[Path, Future[None]] = {}
"""What is being compiled, and was waited for by nobody yet, by where it will lie."""

_log = logging.getLogger("offstage")


def begin(source: Path, functions: Collection[str]) -> None:
    """Have ``build`` begin in a thread, if there is memory for that beside another process; who builds waits for it.

    A process that ends meanwhile ends it, and leaves nothing of it.
    """
    folder = _place(source)
    if folder is None or folder in _begun or load(source) is not None or not has_room(_COMPILER_BYTES):
        return
    _begun[folder] = begun(partial(_build, source, folder, functions))
    atexit.register(_begun[folder].exception)  # once the compiler was stopped, which is registered later


def build(source: Path, functions: Collection[str]) -> None:
    """Have ``source`` compiled and kept, unless it is; what stands in the way is told, and nothing is kept.

    A library without one of the ``functions`` is no good.
    """
    folder = _place(source)
    if folder is None:
        return
    future = _begun.pop(folder, None)
    if future is not None:
        future.result()
    elif load(source) is None:
        _build(source, folder, functions)


def _build(source: Path, folder: Path, functions: Collection[str]) -> None:
    try:
        _keep(source, folder, functions)
        del _in_use[folder]
    except (OSError, OffstageError, subprocess.SubprocessError) as error:
        _log.info(
            "%s: isn't compiled (%s); torch's operators dequantise weights, which takes longer", source.name, error
        )


def load(source: Path) -> ctypes.CDLL | None:
    """Return what was built of ``source``; null where nothing was, or it can't be used."""
    folder = _place(source)
    if folder is not None and folder not in _in_use:
        _in_use[folder] = _opened(folder)
    return None if folder is None else _in_use[folder]


@cache
def identity(source: Path) -> str:
    """Return what compiled code hangs on, as a hash: a home may be shared by machines of several kinds."""
    text = "\n".join([source.read_text(encoding="utf-8"), *_FLAGS, sys.platform, processor_features()])
    return sha256(text.encode()).hexdigest()[:16]


def _keep(source: Path, folder: Path, functions: Collection[str]) -> None:
    """Have what is compiled of ``source`` lie in ``folder``, with the cache's folders above closed to others."""
    root = folder.parents[1]
    make_private(folder.parent, below=root)
    require_private(folder.parent)
    if os.statvfs(folder.parent).f_flag & os.ST_NOEXEC:
        raise PermissionError(errno.EACCES, "its file system runs no code", str(folder.parent))
    store = Store(root)
    if store.find(FOLDER, folder.name) is not None:
        if _opened(folder) is not None:
            return  # another process has compiled it meanwhile
        move_aside(folder, "others may write to it, or it can't be loaded")
    store.obtain(FOLDER, folder.name, partial(_compile, source, functions))
    store.sweep()


def _compile(source: Path, functions: Collection[str], folder: Path) -> None:
    compiler = _compiler()
    if compiler is None:
        raise FileNotFoundError(errno.ENOENT, "there is no C compiler", "cc")
    _log.info("compiles what dequantises weights, once for this processor: some seconds")
    folder.chmod(0o700)
    library_file = folder / LIBRARY
    command = [*compiler, *_FLAGS, "-o", str(library_file), str(source)]
    nothing = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True) as process:
        stop = partial(os.killpg, process.pid, signal.SIGKILL)  # a compiler is several processes
        atexit.register(stop)
        try:
            process.wait(_SECONDS)
        except BaseException:
            stop()
            raise
        finally:
            atexit.unregister(stop)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    library_file.chmod(0o700)  # the linker goes by the umask
    library = ctypes.CDLL(str(library_file))
    lacking = [name for name in functions if not hasattr(library, name)]
    if lacking:
        raise OSError(errno.ENOEXEC, f"what {compiler[0]} made of it has no {lacking[0]}", str(source))


def _compiler() -> list[str] | None:
    """Return the command of the compiler that ``$CC`` names, or of the first that is installed."""
    with suppress(ValueError):  # a quote that isn't closed
        named = shlex.split(os.environ.get("CC", ""))
        if named:
            return named
    return next(([path] for name in _COMPILERS if (path := shutil.which(name))), None)


def _place(source: Path) -> Path | None:
    """Return the folder where what is compiled of ``source`` is kept; null where there is no place for it."""
    return _place_for(source, tuple(map(os.environ.get, _PLACED_BY)))


@cache  # it is asked for each block that is unpacked
def _place_for(source: Path, _environment: tuple[str | None, ...]) -> Path | None:
    if sys.platform == "win32" or sys.byteorder != "little":
        return None
    try:
        return user_cache().resolve() / FOLDER / f"{source.stem}-{identity(source)}"
    except RuntimeError:  # a user without a home
        return None


def _opened(folder: Path) -> ctypes.CDLL | None:
    """Return the library in ``folder``; null where there is none, it isn't as it was written, or can't be run."""
    try:
        require_private(folder)
        return _load_from(folder)
    except (DamagedError, OSError):  # the second too where the system doesn't run code from there
        return None


def _load_from(folder: Path) -> ctypes.CDLL:
    """Return the library in ``folder``: the very file that was held against its hash.

    The file stays open. A library goes by the name that it was loaded by, and that of another would be the same.
    """
    files, path = verify(folder, stage=FOLDER, key=folder.name), folder / LIBRARY
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        content = os.pread(file, files[LIBRARY].size + 1, 0) if LIBRARY in files and is_private(os.fstat(file)) else b""
        if not content or sha256(content).hexdigest() != files[LIBRARY].sha256:
            raise DamagedError(f"{LIBRARY} isn't what was compiled")
        return ctypes.CDLL(f"/proc/self/fd/{file}" if sys.platform == "linux" else str(path))
    except BaseException:
        os.close(file)
        raise
