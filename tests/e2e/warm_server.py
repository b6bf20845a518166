"""Commands without the seconds of their imports: a server imports once what they import, and forks each from itself.

A fork is the command from its first line on: it has the folder, environment, arguments, streams and signals that it
would be started with, and ends as an interpreter ends, up to the last function that is to be called at its end; what
was imported isn't taken apart then. What a process is before that line, it shares with the server: the hash seed, what
the environment says to an interpreter and to imports, memory; and it syncs no file. Where a test is about these, it
starts a process.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TextIO

from offstage.pipeline.environment import imported_packages
from offstage.pipeline.interpreter import uncollected
from tests.unsynced import leave_unsynced

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "offstage.pipeline.app", "offstage.pipeline.sweeps.local_jobs", "offstage.pipeline.job", "offstage.pipeline.runner",
    "offstage.pipeline.sweeps.results", "offstage.stages.plan.stage", "offstage.stages.shard_load.stage",
    "offstage.stages.dispatch.stage", "offstage.stages.dispatch.streaming.streamer", "offstage.stages.generate.stage",
    "offstage.stages.generate.generation", "hydra._internal.hydra",
    "hydra._internal.core_plugins.importlib_resources_config_source", "rich._emoji_codes",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip
"""What the slowest of a run's imports belong to; a fork imports the others as a process does."""
SET_BY_RUNS = (
    "LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "TOKENIZERS_PARALLELISM", "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED", "_MLFLOW_TELEMETRY_SESSION_ID",
)  # fmt: skip
"""Environment variables that a run, or a compiled generate, sets in its process, which may be that of the tests."""
OF_A_HOST = (
    "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip
"""What torchrun tells a process by; it is read when a run begins."""
_REQUEST_BYTES, _DESCRIPTORS = 1 << 20, 8
_READY, _BEGUN = b"ready", "begun"
Leads = Literal["session", "group"]


class ForkedCommand:
    """A command that runs in a fork: to who started it, what these tests use of ``subprocess.Popen``."""

    def __init__(self, pid: int, ending: TextIO, stdout: TextIO | None, stderr: TextIO | None) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: int | None = None
        self._ending = ending

    def __enter__(self) -> ForkedCommand:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # nobody has it end any more
            self.kill()
        self.wait()
        self._close()

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal, null while it runs."""
        return self._end(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit code; raises ``subprocess.TimeoutExpired``."""
        code = self._end(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end and return what it wrote to both streams since they were last read.

        One that hasn't ended by then, or by a test's deadline, is killed, so that what reads its streams ends too.
        """
        streams = [stream for stream in (self.stdout, self.stderr) if stream is not None]
        with ThreadPoolExecutor(max(1, len(streams))) as readers:
            reading = [readers.submit(stream.read) for stream in streams]
            try:
                self.wait(timeout)
            except BaseException:
                self.kill()
                raise
            texts = [each.result() for each in reading]
        self._close()
        return (texts[0], texts[1]) if len(texts) == 2 else ("", "")

    def send_signal(self, number: int) -> None:
        """Send it a signal; its end is no fault."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # its end may be told a moment later
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def _end(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._ending], [], [], timeout)[0]:
            self.returncode = int(self._ending.readline())
            self._ending.close()
        return self.returncode

    def _close(self) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()


class WarmServer:
    """The server's side that tests see. It forks only what it may: see ``serves``."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = of_imports(environment)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        find = f"import sys; sys.path.insert(1, {str(ROOT)!r})"
        program = f"{find}; from tests.e2e.warm_server import serve; del sys.path[1]; serve({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd="/", env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()
        self._forks = self._control.recv(_REQUEST_BYTES) == _READY

    @property
    def pid(self) -> int:
        """The process whose children the forks are."""
        return self._process.pid

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Return whether a command with ``environment`` may be a fork: it fits, and no import has started a thread."""
        return self._forks and self.fits(environment)

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Return whether its imports saw ``environment``."""
        return of_imports(environment) == self._environment

    def start(
        self, folder: Path, arguments: Sequence[str], environment: Mapping[str, str], *, entry: str = "offstage"
    ) -> ForkedCommand:
        """Start the ``entry`` of ``offstage.pipeline.commands`` in ``folder``, with pipes to read what it writes."""
        (out, to_out), (err, to_err), nothing = os.pipe(), os.pipe(), os.open(os.devnull, os.O_RDONLY)
        try:
            return self.start_on(
                (nothing, to_out, to_err), folder, arguments, environment,
                entry=entry, read=(os.fdopen(out), os.fdopen(err)),
            )  # fmt: skip
        finally:
            for descriptor in (nothing, to_out, to_err):
                os.close(descriptor)

    def start_on(
        self, streams: Sequence[int], folder: Path, arguments: Sequence[str], environment: Mapping[str, str],
        *, entry: str = "offstage", leads: Leads | None = None, kept: Sequence[int] = (),
        read: tuple[TextIO | None, TextIO | None] = (None, None),
    ) -> ForkedCommand:  # fmt: skip
        """Start the ``entry`` of the commands on these standard streams, as the first of what it ``leads``.

        The descriptors ``kept`` stay open in it, for what they lock.
        """
        ending, ended = os.pipe()
        request = {"folder": str(folder), "arguments": arguments, "environment": dict(environment)}
        message = json.dumps({**request, "entry": entry, "leads": leads}).encode("utf-8", "surrogateescape")
        socket.send_fds(self._control, [message], [*streams, *kept, ended])
        os.close(ended)
        answers = os.fdopen(ending, buffering=1)
        begun, _, pid = answers.readline().partition(" ")
        assert begun == _BEGUN, "the fork ended before the command began: see what it wrote to standard error"
        return ForkedCommand(int(pid), answers, *read)

    def close(self) -> None:
        """End the server."""
        self._control.close()
        self._process.wait(timeout=60)


def of_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what of an environment an import could read: not what pytest writes there, or what is read later.

    That is what Hydra reads, where the user's key lies, which host of several a process is, and which kernels its first
    product chooses.
    """
    read_later = ("TERM", "HYDRA_FULL_ERROR", "XDG_DATA_HOME", "MKL_CBWR", *SET_BY_RUNS, *OF_A_HOST)
    return {
        name: value for name, value in environment.items() if name not in read_later and not name.startswith("PYTEST_")
    }


def place_of(entry: str) -> tuple[str, str]:
    """Return the module and the name in it of an ``entry``: ``module:name``, or a name in the commands'."""
    module, _, name = entry.rpartition(":")
    return module or "offstage.pipeline.commands", name


def serve(control: int) -> None:
    """Fork what is asked for over the socket ``control``, until its other end is closed. Returns in the forks too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the tests
    codes = list[int]()
    atexit.register(_leave, codes)  # the first is called last
    given = dict(os.environ)
    for name in IMPORTED:
        importlib.import_module(name)
    leave_unsynced()
    imported_packages()  # what is installed is looked through once, and not by each fork
    made = {name: value for name, value in os.environ.items() if given.get(name) != value}
    gc.collect()
    gc.freeze()  # a fork's collections then leave the pages alone that it shares with the server
    with uncollected():
        pass  # it has seen now that something is frozen, which takes each fork a tenth of a second
    requests = socket.socket(fileno=control)
    alone = len(list(Path("/proc/self/task").iterdir())) == 1  # a fork has no other thread, and what one holds is lost
    requests.send(_READY if alone else b"threads")
    running: dict[int, tuple[int, int]] = {}
    while True:
        for ready in select.select([requests, *running], [], [])[0]:
            if ready is not requests:
                _tell_end(ready, *running.pop(ready))
                continue
            message, descriptors, _, _ = socket.recv_fds(
                requests, _REQUEST_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
            if not message:
                return
            *streams, answers = descriptors
            pid = os.fork()
            if not pid:
                requests.close()
                for descriptor, (_, other) in running.items():
                    os.close(descriptor)
                    os.close(other)
                _run(json.loads(message.decode("utf-8", "surrogateescape")), streams, answers, made, codes)
                return
            for stream in streams:
                os.close(stream)
            running[os.pidfd_open(pid)] = pid, answers


def _leave(codes: Sequence[int]) -> None:
    """End a fork whose command has ended with an exit code, after all else that is to be done at the end.

    What the interpreter would do yet is to take apart what was imported, which copies the pages that a fork shares
    with its server: half of what a short command takes. Processes that are none do that.
    """
    with suppress(OSError, ValueError):  # the interpreter says so, and has an exit code of its own for that
        for code in codes:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _tell_end(descriptor: int, pid: int, answers: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(descriptor)
    os.write(answers, f"{code}\n".encode())
    os.close(answers)


def _run(
    request: dict[str, Any], streams: Sequence[int], answers: int, made: Mapping[str, str], codes: list[int]
) -> None:
    """Be the command, from where its interpreter would begin with its program; ``codes`` gets its exit code."""
    if request["leads"]:
        os.setsid() if request["leads"] == "session" else os.setpgid(0, 0)
    os.chdir(request["folder"])
    for standard, opened in enumerate(streams[:3]):
        os.dup2(opened, standard)
        os.close(opened)
    _open_streams()
    os.environ.clear()
    os.environ.update({**request["environment"], **made})
    sys.argv = ["-c", *request["arguments"]]
    if request["entry"] == "job":
        sys.path.remove("")  # it is started with -P
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.write(answers, f"{_BEGUN} {os.getpid()}\n".encode())
    os.close(answers)
    module, name = place_of(request["entry"])
    try:
        getattr(importlib.import_module(module), name)()
    except SystemExit as left:
        codes.extend([left.code] if isinstance(left.code, int) else [])
        raise
    codes.append(0)


def _open_streams() -> None:
    """Have the streams that an interpreter makes for these descriptors: the server's were made for others."""
    for name, mode, buffering in (("stdin", "r", -1), ("stdout", "w", -1), ("stderr", "w", 1)):
        old = getattr(sys, name)
        new = open(old.fileno(), mode, buffering, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
