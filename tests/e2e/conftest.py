"""The command as users run it: a fresh process in an empty folder."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from offstage.pipeline.decoding import decode
from offstage.pipeline.installed_stages import metric_table
from offstage.pipeline.run_schema import Run
from tests.e2e.warm_server import ROOT, SET_BY_RUNS, ForkedCommand, WarmServer, of_imports, place_of
from tests.json_schema import run_validator
from tests.rehearsals import rehearses_once as rehearses_once

COMMAND = [sys.executable, "-c", "from offstage.pipeline.commands import offstage; offstage()"]
HOST_RATES = "hardware.rates={storage: 1GB, host: 10GB, calls: 15000, loops: 700}"
"""Rates for tests that judge no seconds: to measure them takes as long as most of these."""

Process = subprocess.Popen[str] | ForkedCommand
Replay = Callable[..., tuple[int, str, str]]


@dataclass(frozen=True)
class Finished:
    """One finished command: its exit code, what it printed, and the records of the runs it made."""

    code: int
    out: str
    err: str
    records: list[dict[str, Any]]

    @property
    def record(self) -> dict[str, Any]:
        assert len(self.records) == 1, (len(self.records), self.err)
        (record,) = self.records
        run_validator().validate(record)
        table = metric_table(decode(Run, record, "open"))
        undeclared = [name for name in record["metrics"] if table.find(name) is None]
        assert not undeclared, "each metric is declared by the stage that reports it"
        return record

    @property
    def tokens(self) -> list[list[int]]:
        return [output["token_ids"] for output in self.record["outputs"]]

    @property
    def cached(self) -> dict[str, bool]:
        return {stage["name"]: stage["cached"] for stage in self.record["stages"]}


HUSHED = ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY")
"""What a command that runs in this process sets for its libraries, and for the jobs that it starts."""


def records_in(folder: Path) -> dict[Path, dict[str, Any]]:
    """Return every run record below ``folder``, oldest first."""
    paths = sorted(folder.glob("outputs/**/run.json"))
    return {path: json.loads(path.read_text()) for path in paths}


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a command: this process's, with the changes of the test, and ``extra``.

    What a command that ran in this process left there is no part of it.
    """
    left = ("HYDRA_FULL_ERROR", *HUSHED, *SET_BY_RUNS)
    clean = {key: value for key, value in os.environ.items() if key not in left}
    return {**clean, "HF_HUB_OFFLINE": "1", **(extra or {})}


def heed_signals() -> None:
    """Have the process that is started heed every signal, whatever these tests themselves were told to ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


_servers: list[WarmServer] = []
_ENVIRONMENT = environment()
"""A command's as it is before any test changes this process's."""


@pytest.fixture(scope="session", autouse=True)
def _ends_servers() -> Iterator[None]:
    yield
    while _servers:
        _servers.pop().close()


def warm_server(variables: Mapping[str, str]) -> WarmServer | None:
    """Return the server that can fork a command with the environment ``variables``, null where none can.

    It is started when a command is first wanted with this process's environment as it was before any test changed it.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    if of_imports(variables) == of_imports(_ENVIRONMENT) and not any(server.fits(variables) for server in _servers):
        _servers.append(WarmServer(_ENVIRONMENT))
    return next((server for server in _servers if server.serves(variables)), None)


@contextmanager
def another_server(variables: Mapping[str, str]) -> Iterator[None]:
    """Have a server for commands with the environment ``variables`` too: for tests that start several of them."""
    server = WarmServer(variables)
    _servers.append(server)
    try:
        yield
    finally:
        _servers.remove(server)
        server.close()


def start(folder: Path, *arguments: str, entry: str = "offstage", extra: Mapping[str, str] | None = None) -> Process:
    """Start the command in ``folder``, in a fork of the warm server where that is the same, and return its process.

    ``entry`` names another command, as ``offstage.pipeline.commands`` does, or a function of these tests' own as
    ``module:name``; ``extra`` is put into its environment.
    """
    variables = {**environment(), **(extra or {})}
    server = warm_server(variables)
    if server is None:
        return start_anew(folder, *arguments, entry=entry, extra=extra)
    return server.start(folder, arguments, variables, entry=entry)


def start_anew(
    folder: Path, *arguments: str, entry: str = "offstage", extra: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start the command in a process of its own: for tests of what a fork shares with its server."""
    module, name = place_of(entry)
    variables = {**environment(), **(extra or {})}
    return subprocess.Popen(
        [sys.executable, "-c", f"from {module} import {name}; {name}()", *arguments],
        cwd=folder,
        env=variables if module.startswith("offstage.") else {**variables, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=heed_signals,
    )


def wait_for(happened: Callable[[], object], process: Process, *, seconds: float = 250) -> None:
    """Wait until something of ``process`` has ``happened``; it must not have ended before."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None, f"it ended with {process.returncode} before"
        assert time.monotonic() < deadline, f"it never happened in {seconds} s"
        time.sleep(0.01)


def kill_when(happened: Callable[[], object], process: Process) -> bool:
    """Kill ``process`` when something has ``happened``; return whether it was still at work."""
    with process:
        while process.poll() is None:
            if happened():
                process.kill()
            time.sleep(0.002)
    return process.returncode == -signal.SIGKILL


def finish(process: Process, folder: Path, before: Mapping[Path, Any], *, seconds: float = 300) -> Finished:
    """Wait for ``process`` and return what came of it; ``before`` holds the records that were there already."""
    out, err = process.communicate(timeout=seconds)
    new = [record for path, record in records_in(folder).items() if path not in before]
    return Finished(process.returncode, out, err, new)


def enter(folder: Path, *arguments: str) -> int:
    """Run the command in ``folder`` inside this process and return its exit code."""
    from hydra.core.global_hydra import GlobalHydra

    from offstage.pipeline.app import main
    from offstage.pipeline.process_setup import hush_libraries

    hush_libraries()  # a command's process is made ready before that
    GlobalHydra.instance().clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["offstage"])
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
    return int(exit_info.value.code or 0)


def record_of(folder: Path, described: Path, *arguments: str) -> Path:
    """Run the command in ``folder``, where nothing has run yet, as ``enter`` does; return where its record lies.

    What is ``described`` lies in its cache.
    """
    shutil.copytree(described, folder / "outputs/cache")
    assert enter(folder, *arguments) == 0
    (path,) = records_in(folder)
    return path


@pytest.fixture(autouse=True)
def _ends_interrupts() -> Iterator[None]:
    """Have a command that ran in this process not be asked about what Python drops later: the next ask their own."""
    hook = sys.unraisablehook
    yield
    sys.unraisablehook = hook


@pytest.fixture(scope="session")
def described(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache that knows the embedded model and this machine: most of a small run is to find out both."""
    folder = tmp_path_factory.mktemp("described")
    assert enter(folder, "stop_after=plan") == 0
    shutil.rmtree(folder / "outputs/cache/plan")
    return folder / "outputs/cache"


@pytest.fixture
def fresh_folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return this test's folder, in which nothing has run yet.

    What is ``described`` lies in its cache, unless the test is marked as one that begins ``from_nothing``.
    """
    if request.node.get_closest_marker("from_nothing") is None:
        shutil.copytree(request.getfixturevalue("described"), tmp_path / "outputs/cache")
    return tmp_path


@pytest.fixture
def offstage(fresh_folder: Path, request: pytest.FixtureRequest) -> Callable[..., Finished]:
    """Return a function that runs the command in this test's folder, to its end.

    It is a fork of the warm server, unless the test is marked as one ``of_the_process``.
    """
    begin = start if request.node.get_closest_marker("of_the_process") is None else start_anew

    def run(*arguments: str) -> Finished:
        before = records_in(fresh_folder)
        return finish(begin(fresh_folder, *arguments), fresh_folder, before)

    return run


@pytest.fixture
def offstage_here(fresh_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Iterator[Callable[..., Finished]]:
    """Yield a function that runs the command inside this process: the same code, without the imports' seconds.

    Modules of the test's own folder go with it: another test has others by these names.
    """
    monkeypatch.chdir(fresh_folder)

    def run(*arguments: str) -> Finished:
        before = records_in(fresh_folder)
        capfd.readouterr()  # what the test itself has said, such as the progress of writing a checkpoint
        code = enter(fresh_folder, *arguments)
        captured = capfd.readouterr()
        new = [record for path, record in records_in(fresh_folder).items() if path not in before]
        return Finished(code, captured.out, captured.err, new)

    yield run
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(f"{fresh_folder}{os.sep}"):
            del sys.modules[name]


def start_job(
    command: Sequence[str], *, process_group: int, pass_fds: Sequence[int] = (),
    stdout: IO[bytes] | None = None, stderr: IO[bytes] | None = None,
) -> Process:  # fmt: skip
    """Start the ``command`` of a job as ``offstage.pipeline.job_process`` would, in a fork where that is the same."""
    asked = {
        key: value for key, value in os.environ.items() if key not in HUSHED or value != "error"
    }  # a job hushes its own
    variables = {**asked, "HF_HUB_OFFLINE": "1"}
    plain = list(command[:3]) == [sys.executable, "-P", "-c"]  # and under no cap
    server = warm_server(variables) if plain else None
    if server is None:
        return subprocess.Popen(command, process_group=process_group, pass_fds=pass_fds, stdout=stdout, stderr=stderr)
    streams = (0, stdout.fileno() if stdout else 1, stderr.fileno() if stderr else 2)
    arguments = list(command[4:])
    if "--parent" in arguments:  # a job ends with who waits for it, which for a fork is the server
        arguments[arguments.index("--parent") + 1] = str(server.pid)
    return server.start_on(streams, Path.cwd(), arguments, variables, entry="job", leads="group", kept=pass_fds)


@contextmanager
def forked_jobs() -> Iterator[None]:
    """Have each job that this process starts be a fork of the warm server, where that is the same."""
    from offstage.pipeline import job_process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_process, "subprocess", SimpleNamespace(Popen=start_job))
        yield


@pytest.fixture
def jobs_fork() -> Iterator[None]:
    """Have this test's jobs run in forks instead of processes that import all again."""
    with forked_jobs():
        yield


@pytest.fixture
def replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, jobs_fork: None) -> Replay:
    """Return a function that replays what it is given, in this test's empty folder: exit code, output, errors."""
    from offstage.pipeline.replay_command import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_info:
            main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    return run
