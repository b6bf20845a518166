"""Runs of the command without the seconds of its imports: a server imports all once, and forks a child for each run.

The child waits for its cue before it does anything, so that strace can be attached to it; what the strace of a whole
process would count too, thousands of files that imports open, is past by then.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_PATHS = (ROOT, ROOT / ".src")
_ANY_TRACER = ctypes.c_ulong(-1)
_SET_TRACER = 0x59616D61  # prctl's PR_SET_PTRACER


@dataclass(frozen=True, slots=True)
class Shortening:
    """A call on a file under ``folder`` that is to do half of what it was asked, the ``number``-th (0: none); ``log``
    lists the calls.
    """

    library: Path
    folder: Path
    call: str
    number: int
    log: Path


class ForkServer:
    """A process that has imported what a run needs, and forks a child for each run. A context manager."""

    def __init__(self, *, preload: Path | None = None) -> None:
        loaded = {"LD_PRELOAD": str(preload)} if preload else {}
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        path = os.pathsep.join(map(str, _PATHS))
        clean = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.faults.fork_server"],
            env={**clean, **threads, **loaded, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def import_modules(self, names: Sequence[str]) -> None:
        """Have the server import all of ``names`` that it can."""
        self._ask({"import": list(names)})

    def fork(
        self, arguments: Sequence[str], *, folder: Path, modules: Path | None = None, short: Shortening | None = None
    ) -> int:
        """Return the process id of a run in ``folder`` that waits for ``go``. Its output goes to files there.

        It writes the names of the modules that it had imported in the end to ``modules``.
        """
        shortened = [str(short.library), str(short.folder), short.call, short.number, str(short.log)] if short else None
        request = {"arguments": list(arguments), "folder": str(folder), "short": shortened}
        return int(self._ask({"fork": {**request, "modules": str(modules) if modules else None}}))

    def go(self, *, seconds: int = 250) -> int:
        """Let the run that was forked last begin, wait for its end and return its exit code, negative for a signal.

        After so many ``seconds`` SIGALRM ends it.
        """
        return int(self._ask({"go": seconds}))

    def _ask(self, request: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def serve() -> None:
    """Do what the lines of standard input ask for, one at a time, and answer each with a line."""
    answers = os.dup(1)
    os.dup2(2, 1)
    child = cue = 0
    for line in sys.stdin:
        request = json.loads(line)
        answer = 0
        for name in request.get("import", ()):
            with suppress(Exception):
                importlib.import_module(name)
        if "fork" in request:
            waiting, cue = os.pipe()
            gc.collect()
            gc.freeze()  # a child's collections then leave the pages alone that it shares with the server
            child = answer = os.fork()
            if not child:
                os.close(cue)
                os.close(answers)
                _run(request["fork"], waiting)
                return
            os.close(waiting)
        if "go" in request:
            os.write(cue, bytes([request["go"]]))
            os.close(cue)
            answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(answers, f"{answer}\n".encode())


def _run(request: dict[str, Any], waiting: int) -> None:
    """Be the command, once there is something to read from ``waiting``."""
    ctypes.CDLL(None).prctl(_SET_TRACER, _ANY_TRACER, 0, 0, 0)
    os.chdir(request["folder"])
    streams = os.open(os.devnull, os.O_RDONLY), _create("stdout"), _create("stderr")
    for standard, opened in enumerate(streams):
        os.dup2(opened, standard)
        os.close(opened)
    sys.argv = ["offstage", *request["arguments"]]
    signal.alarm(os.read(waiting, 1)[0])
    os.close(waiting)
    if request["short"]:
        library, folder, call, number, log = request["short"]
        ctypes.CDLL(library).shorten(folder.encode(), call.encode(), number, log.encode())
    from offstage.pipeline.commands import offstage

    try:
        offstage()
    finally:
        if request["modules"]:
            Path(request["modules"]).write_text(json.dumps(list(sys.modules)))


def _create(name: str) -> int:
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)


if __name__ == "__main__":
    serve()
