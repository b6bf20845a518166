"""What a command relies on, put right before it begins: streams, arguments, the current folder.

Each is given by whoever starts the process, and each can be missing or broken: a closed standard output (``>&-``) would
give its number to the next file that is opened, an ascii one would end a run at the first accent.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

_PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
STARTED_TOGETHER = {"RANK", "WORLD_SIZE"}
"""The variables by which a process knows that torchrun, or a hand, started it as one of several."""
_ON_ONE_MACHINE = "LOCAL_WORLD_SIZE"
"""How many of these are on this machine, by torchrun."""
WAIT_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Those by which the environment says how long idle threads of OpenMP's teams wait in a loop before they sleep."""
_LOOPS = 10_000
"""For how many rounds they do, of several hosts: longer than from one operator to the next, and a thirtieth of what
GNU's runtime has them wait by itself, which are milliseconds."""
_UNUSABLE = 2
"""The exit code, that of a config which can't be carried out."""


def set_up(name: str) -> None:
    """Make the process one that the command ``name`` can run in, or exit with one line that says why it can't be."""
    open_streams()
    hush_libraries()
    share_cores()
    fault = argument_fault(sys.argv[1:]) or folder_fault()
    if fault:
        sys.stderr.write(f"{name}: {fault}\n")
        sys.exit(_UNUSABLE)


def hush_libraries() -> None:
    """Have the libraries of models tell errors alone in this process, unless the environment says otherwise."""
    for library in ("transformers", "diffusers"):
        said = os.environ.setdefault(f"{library.upper()}_VERBOSITY", "error")
        if library in sys.modules and said == "error":
            import_module(f"{library}.utils.logging").set_verbosity_error()


def share_cores() -> None:
    """Have idle teams of operators let others have the cores where this process is one of several on its machine,
    unless the environment says otherwise: one of them computes what this one waits for.

    OpenMP reads it as torch is imported, and at no other time.
    """
    if on_one_machine() > 1 and os.environ.keys().isdisjoint(WAIT_POLICIES):
        os.environ[WAIT_POLICIES[1]] = str(_LOOPS)


def is_one_of_several() -> bool:
    """Return whether the environment says which of several processes this is, that were started together."""
    return os.environ.keys() >= STARTED_TOGETHER


def on_one_machine() -> int:
    """Return how many of the processes that were started together share this machine, and so its memory and cores."""
    processes = os.environ.get(_ON_ONE_MACHINE, "")
    return max(1, int(processes)) if is_one_of_several() and processes.isdecimal() else 1


def open_streams() -> None:
    """Have the standard streams open, on nothing where they were closed, and show what their encoding hasn't."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - lives with the process
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def argument_fault(arguments: Sequence[str]) -> str | None:
    """Return what is wrong with the first argument that isn't text, null if all are."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            return f"{argument!r} is an argument with bytes that aren't UTF-8; give it as UTF-8"
    return None


def folder_fault() -> str | None:
    """Return what is wrong with the current folder, null if it is there."""
    try:
        os.getcwd()  # noqa: PTH109 - pathlib takes 10 ms to import
    except OSError as error:
        return f"the current folder can't be used: {error.strerror}; change to one that exists"
    return None


def own_command(entry: str, *arguments: str) -> list[str]:
    """Return the command of a process that begins at the ``entry`` of ``offstage.pipeline.commands``.

    -P keeps the current folder out of its import path: it may hold a folder named conf, numpy or stages.
    """
    return [sys.executable, "-P", "-c", f"from offstage.pipeline.commands import {entry}; {entry}()", *arguments]


def die_with_parent(parent: int) -> None:
    """Have SIGTERM come when the process ``parent``, which waits for this one, is gone: nobody would see its end.

    It may be gone already, of which the kernel would say nothing any more.
    """
    if sys.platform == "linux":
        import ctypes  # most processes are nobody's child

        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)
