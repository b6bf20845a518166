"""Probes that run in a process of their own: what they take of memory is no part of a run's peak.

They can begin beside other work, in a thread that waits for that process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from offstage.pipeline.peers import environment_alone
from offstage.stages.machine.host_memory import PROCESS_BYTES, host_memory

T = TypeVar("T")

_SECONDS = 300
_PROGRAM = "from offstage.stages.machine.own_process import answer; answer()"


def has_room(beside: int = 0, *, own: int = PROCESS_BYTES) -> bool:
    """Return whether the host has memory for a second process, so many bytes ``beside``, and what this one comes to
    hold meanwhile: its ``own`` bytes.
    """
    return host_memory().available_bytes >= PROCESS_BYTES + own + beside


def begun(work: Callable[[], T]) -> Future[T]:
    """Return what will have what ``work`` returns or raises, which goes on in a thread from now on.

    A process that ends meanwhile doesn't wait for it.
    """
    future = Future[T]()
    Thread(target=_fulfil, args=(future, work), daemon=True).start()
    return future


def _fulfil(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - who asks has it
        future.set_exception(error)


def measure_apart(
    module: str,
    *arguments: str,
    beside: int = 0,
    own: int = PROCESS_BYTES,
    folder: Path | None = None,
    here: Callable[[], Any] | None = None,
) -> Any:
    """Return what ``measure`` of ``module``, named below ``stages``, returns of ``arguments`` in a process of its own,
    in ``folder``.

    Null where it fails. Where there is no memory for a second process, as ``has_room`` says, it is what is found
    ``here``; null without.
    """
    if here is not None and not has_room(beside, own=own):
        return here()
    (answer,) = measure_together([(module, *arguments)], beside=beside, own=own, folder=folder)
    return answer


def measure_together(
    questions: Sequence[Sequence[str]], *, beside: int = 0, own: int = PROCESS_BYTES, folder: Path | None = None
) -> Sequence[Any]:
    """Return what ``measure_apart`` does of each of ``questions``, a module and its arguments: all in one process, one
    after the other.

    All are null where one fails, or there is no memory for that process.
    """
    nothing = [None] * len(questions)
    if not has_room(beside, own=own):
        return nothing
    command = [sys.executable, "-P", "-c", _PROGRAM, str(os.getpid()), json.dumps(questions)]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment_alone(), timeout=_SECONDS, check=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        answers = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError):
        return nothing
    return answers if isinstance(answers, list) and len(answers) == len(questions) else nothing


def answer() -> None:
    """Be the process that is asked: print the answers, as JSON in the last line."""
    be_expendable(parent=int(sys.argv[1]))
    questions = json.loads(sys.argv[2])
    answers = [import_module(f"offstage.stages.{module}").measure(*arguments) for module, *arguments in questions]
    sys.stdout.write(f"\n{json.dumps(answers)}\n")


def be_expendable(*, parent: int) -> None:
    """Have this process be the first to be ended where memory is short, and end with the ``parent`` that waits."""
    from offstage.pipeline.process_setup import die_with_parent

    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    die_with_parent(parent)
