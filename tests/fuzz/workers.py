"""Cases, each tried where it can do no harm: in a process forked after the imports, bounded in time and memory.

What a case comes to is a word: an outcome that may be, or a fault. A hang and a kill are faults of one case; the next
one is tried in another process.
"""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from random import Random
from typing import IO, Any

from offstage.pipeline.errors import OffstageError
from tests.fuzz.formats import ALONE, REFUSED, RIGHT, Files, Format, WrongAnswerError, files_of, write_files

GOOD = (RIGHT, ALONE, REFUSED)
SECONDS = 10
"""Of processor time a case: more is a fault."""
BYTES = 2 * 2**30
"""Of resident memory beside what the process began with."""
_ADDRESSES = 8 * 2**30
_HANG_SECONDS = 30
"""Of processor time without an end: such a case is ended, as is one that waits for ``_WAIT_SECONDS`` of the clock."""
_WAIT_SECONDS = 300
_BATCH = 500


@dataclass(frozen=True, slots=True)
class Case:
    """The case ``number`` of a format under a seed: the file that it changes, and into what."""

    format: str
    seed: int
    number: int
    file: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a case; ``words`` are the error's, or what was wrong."""

    case: Case
    outcome: str
    words: str = ""
    seconds: float = 0.0

    @property
    def is_fault(self) -> bool:
        """Whether it is none of the outcomes that may be."""
        return self.outcome not in GOOD


def make_case(kind: Format, whole: Files, *, seed: int, number: int) -> Case:
    """Return the case ``number``: the same for the same seed, and the same files."""
    chance = Random(f"{kind.name} {seed} {number}")
    names = sorted(name for name in whole if any(fnmatch(name, pattern) for pattern in kind.targets))
    if not names:
        raise ValueError(f"{kind.name}: no file matches {kind.targets}")
    name = chance.choice(names)
    alike = [other for other in names if Path(other).suffix == Path(name).suffix]
    content = whole[name]
    for _ in range(chance.choice((1, 1, 1, 2))):
        content = chance.choice(kind.mutations)(content, whole[chance.choice(alike)], chance)
    return Case(kind.name, seed, number, name, content)


def _pristine(kind: Format, folder: Path) -> Path:
    """Return where the inputs of ``kind`` lie: functions of two modules may share a name."""
    return folder / f"{kind.make.__module__}.{kind.make.__name__}"


def run_cases(kind: Format, numbers: Sequence[int], *, seed: int, folder: Path) -> Iterator[Result]:
    """Try the cases ``numbers`` of ``kind`` in ``folder`` and yield what comes of each; inputs are made there once."""
    pristine = _pristine(kind, folder)
    if not pristine.exists():
        pristine.mkdir()
        _in_child(lambda _: kind.make(pristine), folder)
    whole = files_of(pristine)
    left = list(numbers)
    while left:
        batch = left[: 1 if kind.apart else _BATCH]
        for result in _run_batch(kind, whole, batch, seed=seed, folder=folder):
            left = [number for number in left if number != result.case.number] if kind.apart else left[1:]
            yield result


def modules_of(kind: Format, folder: Path) -> list[str]:
    """Return the modules that a whole case of ``kind`` has imported by its end, in their order."""
    pristine, place = folder / "pristine", folder / "case"
    pristine.mkdir()

    def work(out: IO[bytes]) -> None:
        kind.make(pristine)
        shutil.copytree(pristine, place)
        kind.attempt(place, pristine)
        own = [name for name in sys.modules if name.startswith(("pipeline.", "stages.", "torch.", "transformers."))]
        out.write("\n".join(own).encode())

    return _in_child(work, folder).decode().split()


def _in_child(work: Any, folder: Path) -> bytes:
    """Return what ``work`` writes; it is done in a process of its own, so that this one stays fit to be forked."""
    process, pipe = _fork(work, folder)
    with pipe:
        said = pipe.read()
    status = os.waitpid(process, 0)[1]
    if status:
        raise RuntimeError(f"making the inputs failed: {(folder / 'log').read_text()[-2000:]}")
    return said


def _run_batch(kind: Format, whole: Files, numbers: Sequence[int], *, seed: int, folder: Path) -> Iterator[Result]:
    """Yield the results of the first of ``numbers``, up to all of them, or up to one that ended its process."""

    def work(out: IO[bytes]) -> None:
        for number in numbers:
            result = _try_case(kind, whole, make_case(kind, whole, seed=seed, number=number), folder)
            out.write(json.dumps([result.outcome, result.words, result.seconds]).encode() + b"\n")
            out.flush()

    process, pipe = _fork(work, folder)
    with pipe:
        for number in numbers:
            line = _line(pipe, process)
            if line is None or not line:
                if line is None:
                    os.kill(process, signal.SIGKILL)
                status = os.waitpid(process, 0)[1]
                words = f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {status}"
                case = make_case(kind, whole, seed=seed, number=number)
                outcome = "hang" if line is None else "killed"
                yield Result(case, outcome, f"{words}; {_tail(folder / 'log')}")
                return
            outcome, words, seconds = json.loads(line)
            yield Result(make_case(kind, whole, seed=seed, number=number), outcome, words, seconds)
    os.waitpid(process, 0)


def _line(pipe: IO[bytes], process: int) -> bytes | None:
    """Return the next line that ``process`` writes to ``pipe``, nothing where it ended, null where it hangs.

    A machine that others use may give it little time, so its own counts.
    """
    began, used = time.monotonic(), _processor_seconds(process)
    while time.monotonic() - began < _WAIT_SECONDS and _processor_seconds(process) - used < _HANG_SECONDS:
        if select.select([pipe], [], [], 5)[0]:
            return pipe.readline()
    return None


def _processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _fork(work: Any, folder: Path) -> tuple[int, IO[bytes]]:
    """Do ``work``, which is given a pipe to write to, in a forked process; return that and the pipe to read from."""
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return process, os.fdopen(reading, "rb", buffering=0)
    code = 1
    try:
        os.close(reading)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        address_space = _memory_bytes("VmSize")
        resource.setrlimit(resource.RLIMIT_AS, (address_space + _ADDRESSES, address_space + _ADDRESSES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with os.fdopen(writing, "wb") as out:
            work(out)
        code = 0
    except BaseException:  # noqa: BLE001 - a forked process ends here, whatever happened in it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _try_case(kind: Format, whole: Files, case: Case, folder: Path) -> Result:
    """Put the case's files into place, read them, and judge what came of it."""
    place = folder / "case"
    shutil.rmtree(place, ignore_errors=True)
    write_files(place, {**whole, case.file: case.content})
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now
    began, resident = time.process_time(), _memory_bytes("VmRSS")
    outcome, words = _attempt(kind, place, _pristine(kind, folder))
    seconds, grown = time.process_time() - began, _memory_bytes("VmHWM") - resident
    if outcome in GOOD and seconds > SECONDS:
        outcome, words = "slow", f"{seconds:.1f} s of processor time; {outcome}: {words}"
    if outcome in GOOD and grown > BYTES:
        outcome, words = "large", f"{grown} bytes beside; {outcome}: {words}"
    return Result(case, outcome, words[:4000], seconds)


def _attempt(kind: Format, place: Path, pristine: Path) -> tuple[str, str]:
    try:
        return kind.attempt(place, pristine), ""
    except OffstageError as error:
        fault = _message_fault(str(error))
        return ("message", f"{fault}: {str(error)[:600]!r}") if fault else (REFUSED, f"{type(error).__name__}: {error}")
    except WrongAnswerError as error:
        return "wrong", str(error)
    except BaseException:  # noqa: BLE001 - what may not come out of a case is what is looked for
        return "traceback", traceback.format_exc(limit=-6)


def _message_fault(message: str) -> str | None:
    """Return what is wrong with the text of an error: it is for one bearable line on a terminal."""
    if len(message) > 20_000:
        return f"{len(message)} letters"
    if any(ord(letter) < 32 and letter != "\n" for letter in message):
        return "control characters"
    return None


def _memory_bytes(what: str) -> int:
    """Return a figure of this process's memory in bytes, by its name in ``/proc``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-1500:] if path.is_file() else ""
