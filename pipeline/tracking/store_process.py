"""The process in which a tracker's library works: asked by JSON on its standard input, answers in lines of JSON.

A library of 170 MB is no part of what waits for a sweep's jobs then, nor of what is measured; and whatever a server or
a library does, it takes the process that asked no longer than that has patience, and costs it the tracking alone.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from offstage.pipeline.errors import OffstageError, StorageError, foreign

_ENTRY = "from offstage.pipeline.commands import tracker; tracker()"
PATIENCE_SECONDS = 120.0
"""How long a store is given for all of one request."""

_log = logging.getLogger("offstage")


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """The parts that were ``done``, in their order, and what ended it before its end, null where nothing did."""

    done: Sequence[str]
    error: str | None


def ask(request: Mapping[str, Any]) -> StoreAnswer:
    """Have ``request`` carried out in a process of its own, and return what came of it; it raises nothing."""
    command = [sys.executable, "-P", "-c", _ENTRY]
    process = None
    try:
        process = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        why = f"no end within {PATIENCE_SECONDS:.0f} s"
    except OSError as error:
        said, why = "", str(error)
    else:
        _log.debug("tracker: %s", process.stderr)
        said, why = process.stdout, f"its process ended with code {process.returncode}"
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{") and line.endswith("}")]
    failed = process is None or process.returncode != 0
    reason = next((line["error"] for line in lines if "error" in line), why) if failed else None
    return StoreAnswer([line["done"] for line in lines if "done" in line], reason)


def main() -> None:
    """Carry out what standard input asks for, then exit: with 1 where it failed."""
    request = json.load(sys.stdin)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    code = 0
    try:
        _carry_out(request, answers)
    except OffstageError as error:
        _say(answers, "error", str(error).removeprefix(": "))
        code = 1
    answers.close()
    sys.exit(code)


def _say(answers: IO[str], kind: str, said: str) -> None:
    answers.write(json.dumps({kind: said}) + "\n")
    answers.flush()


def _carry_out(request: Mapping[str, Any], answers: IO[str]) -> None:
    from offstage.pipeline.tracking import requests
    from offstage.pipeline.tracking.options import TrackerConfig

    sweep = Path(request["sweep"]) if request["sweep"] else None
    with foreign(StorageError, ""):
        match request["act"], sweep:
            case "run", _:
                requests.log_run(Path(request["run"]), sweep, done=lambda part: _say(answers, "done", part))
            case "begin", Path():
                requests.begin_sweep(sweep, TrackerConfig(**request["tracker"]))
            case "end", Path():
                requests.end_sweep(sweep, jobs=request["jobs"])
