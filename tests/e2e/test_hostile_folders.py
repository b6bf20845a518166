"""Folders that a stranger sent: nothing that they name is run, nothing is sent, nothing is written beside them."""

from __future__ import annotations

import json
import shlex
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from offstage.pipeline.report.command import run as report
from offstage.pipeline.sweeps.command import main as sweep
from offstage.pipeline.sweeps.record import SweepRecord
from tests.e2e.conftest import Replay, enter, record_of

HARMLESS = ("seed=1", "stop_after=plan")


@dataclass(frozen=True)
class Stranger:
    """A folder that was ``sent``, what lies ``outside`` of it, and an ``address`` at which somebody listens."""

    sent: Path
    outside: Path
    listener: socket.socket

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    @property
    def canary(self) -> Path:
        return self.outside / "canary"

    def sweep(self, *command: str) -> None:
        words = ("-m", *HARMLESS, *command)
        SweepRecord(words, "/nowhere", "a.Sweeper", foreseen=True, base={}, jobs=()).create(self.sent)

    def file(self, name: str, text: str) -> Path:
        path = self.sent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def snapshot(self) -> dict[str, bytes]:
        files = [path for path in self.outside.parent.rglob("*") if not path.is_relative_to(self.sent)]
        return {str(path): path.read_bytes() if path.is_file() else b"" for path in files}


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stranger]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    sender = Stranger(tmp_path / "place/sent", tmp_path / "place/outside", listener)
    sender.sent.mkdir(parents=True)
    sender.outside.joinpath("checkpoint").mkdir(parents=True)
    sender.outside.joinpath("secret.txt").write_text("secret\n")
    sender.outside.joinpath("evil.py").write_text(f"open({str(sender.canary)!r}, 'w').close()\nclass Net: pass\n")
    monkeypatch.syspath_prepend(sender.outside)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.chdir(sender.outside)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "token")
    yield sender
    listener.close()


COMMANDS: dict[str, tuple[str, ...]] = {
    "nothing that does harm": (),
    "a callback": ("+hydra={callbacks:{x:{_target_:shutil.copyfile,src:/etc/hostname,dst:'<canary>'}}}",),
    "a module": ("model=module", "model._target_=evil.Net"),
    "remote code": ("model.path=<sent>", "model.trust_remote_code=true"),
    "outputs": ("outputs=<canary>",),
    "a server": ("tracker=mlflow", "tracker.uri=<address>"),
    "a package to look in": ("hydra.searchpath=[pkg://evil]",),
    "a search": ("hydra/sweeper=optuna", "objective.metric=load_seconds", "model.class=choice(evil.Net)"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_stranger_s_sweep_is_told_and_not_carried_out(case: str, stranger: Stranger, capfd: Any) -> None:
    known = {"canary": stranger.canary, "sent": stranger.sent, "address": stranger.address}
    command = list(COMMANDS[case])
    for name, value in known.items():
        command = [word.replace(f"<{name}>", str(value)) for word in command]
    stranger.sweep(*command)
    before = stranger.snapshot()
    GlobalHydra.instance().clear()
    with pytest.raises(SystemExit) as left:
        sweep(["resume", str(stranger.sent)])
    out, err = capfd.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1), err
    suggestion = shlex.split(err.partition("it goes on there: ")[2])
    assert suggestion == ["offstage", "-m", *HARMLESS, *command, f"hydra.sweep.dir='{stranger.sent}'"]
    assert stranger.snapshot() == before
    with pytest.raises(BlockingIOError):
        stranger.listener.accept()
    assert not list(stranger.sent.rglob("run.json"))


Change = Callable[[dict[str, Any], Stranger], str]


def of_config(word: str, **changes: Any) -> Change:
    def change(record: dict[str, Any], of: Stranger) -> str:
        for key, value in changes.items():
            text = json.dumps(value).replace("<outside>", str(of.outside)).replace("<canary>", str(of.canary))
            group = record["config"][key]
            record["config"][key] = group | json.loads(text) if isinstance(group, dict) else json.loads(text)
        return word.replace("<outside>", str(of.outside))

    return change


REPLAYS: dict[str, Change] = {
    "a class": of_config("evil.Net", model={"class": "evil.Net"}),
    "a target": of_config("evil.Net", model={"kind": "module", "_target_": "evil.Net"}),
    "a nested target": of_config(
        "shutil.copyfile", model={"x": {"_target_": "shutil.copyfile", "src": "/etc/hostname", "dst": "<canary>"}}
    ),
    "remote code of another part": of_config("remote-code", generate={"assistant": {"trust_remote_code": True}}),
    "a prompts file": of_config("<outside>/secret.txt", generate={"prompts_file": "<outside>/secret.txt"}),
    "an image": of_config(
        "<outside>/secret.txt",
        generate={
            "prompts": [
                {"messages": [{"role": "user", "content": [{"type": "image", "path": "<outside>/secret.txt"}]}]}
            ]
        },
    ),
    "a checkpoint": of_config("<outside>/checkpoint", model={"path": "<outside>/checkpoint"}),
    "a checkpoint by dots": of_config("<outside>/checkpoint/..", model={"path": "<outside>/checkpoint/.."}),
    "a Hub id": of_config("org/name", model={"tokenizer": "org/name"}),
    "an adapter": of_config("<outside>", model={"adapter": "<outside>"}),
    "a device map": of_config("<outside>/secret.txt", device_map="<outside>/secret.txt"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, described: Path) -> Path:
    """The record of one completed run, that of a plan."""
    return record_of(tmp_path_factory.mktemp("finished"), described, "stop_after=plan")


@pytest.mark.parametrize("case", REPLAYS)
def test_a_stranger_s_record_does_nothing_that_was_not_said(
    case: str, finished: Path, replay: Replay, stranger: Stranger
) -> None:
    record = json.loads(finished.read_text())
    word = REPLAYS[case](record, stranger)
    path = stranger.file("run.json", json.dumps(record))
    before = stranger.snapshot()
    code, out, err = replay(path)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert shlex.quote(f"--trust={word}") in err
    assert stranger.snapshot() == before


def test_a_replay_does_not_write_through_a_link(finished: Path, replay: Replay, stranger: Stranger) -> None:
    record = json.loads(finished.read_text())
    path = stranger.file("outputs/multirun/0/run.json", json.dumps({**record, "signature": None}))
    stranger.sent.joinpath("outputs/runs").symlink_to(stranger.outside)
    before = stranger.snapshot()
    code, _, err = replay(path)
    assert (code, err.count("\n")) == (2, 1), err
    assert stranger.snapshot() == before


@pytest.mark.parametrize("by", ["a path", "a link"])
def test_a_report_of_a_stranger_s_runs_reads_nothing_beside_them(by: str, finished: Path, stranger: Stranger) -> None:
    record = json.loads(finished.read_text()) | {"signature": None, "device_map": {"": "cpu"}}
    plan = stranger.outside / "plan"
    plan.mkdir()
    layers = '[{"names": ["secret"], "lines": [{"name": "a", "home": "cpu"}]}]'
    plan.joinpath("plan.json").write_text(f'{{"layers": {layers}, "reasons": {{"secret": "cpu"}}}}')
    (entry,) = (stage for stage in record["stages"] if stage["name"] == "plan")
    kept = stranger.sent / "cache/plan" / entry["key"]
    kept.parent.mkdir(parents=True)
    if by == "a link":
        kept.symlink_to(plan)
    entry["artifact"] = str(plan)
    stranger.file("runs/0/run.json", json.dumps(record))
    before = stranger.snapshot()
    report([str(stranger.sent)])
    assert "secret" not in stranger.sent.joinpath("report.json").read_text().replace(str(stranger.outside), "")
    assert stranger.snapshot() == before


@pytest.mark.usefixtures("jobs_fork")
def test_who_gives_the_command_that_is_told_goes_on_with_a_stranger_s_sweep(
    fresh_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    assert enter(fresh_folder, "-m", *HARMLESS, "hydra.sweep.dir=sent") == 0
    folder = fresh_folder / "sent"
    record = SweepRecord.load(folder)
    assert record.is_own
    folder.joinpath("sweep.json").unlink()
    replace(record, signature=None).create(folder)
    shutil.rmtree(folder / "0")
    monkeypatch.chdir(fresh_folder)
    GlobalHydra.instance().clear()
    capfd.readouterr()
    with pytest.raises(SystemExit) as left:
        sweep(["resume", "sent"])
    assert left.value.code == 2
    _, *words = shlex.split(capfd.readouterr().err.rpartition(" && ")[2])
    assert enter(fresh_folder, *words) == 0
    assert folder.joinpath("0/run.json").exists()
