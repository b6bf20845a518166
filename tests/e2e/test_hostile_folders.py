"""Folders that a stranger sent: nothing that they name is run, nothing is sent, nothing is written beside them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.core.global_hydra import GlobalHydra

from offstage.pipeline.record import RunRecord
from offstage.pipeline.report.command import run as report
from offstage.pipeline.sweeps.command import main as sweep
from offstage.pipeline.sweeps.record import SweepJob, SweepRecord
from tests.e2e.conftest import Replay, enter, record_of

HARMLESS = ("seed=1", "stop_after=plan")


class Pickle:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


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

    def sweep(self, *command: str, cwd: str = "/nowhere", jobs: tuple[SweepJob, ...] = ()) -> None:
        words = ("-m", *HARMLESS, *command)
        SweepRecord(words, cwd, "a.Sweeper", foreseen=True, base={}, jobs=jobs).create(self.sent)

    def file(self, name: str, text: str) -> Path:
        path = self.sent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def copied(self) -> str:
        """Return the config of something to be called that leaves a file outside."""
        return f"{{_target_:shutil.copyfile,src:/etc/hostname,dst:{self.canary}}}"

    def found(self) -> dict[str, bytes]:
        files = [path for path in self.outside.parent.rglob("*") if not path.is_relative_to(self.sent)]
        return {str(path): path.read_bytes() if path.is_file() else b"" for path in files}


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stranger]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    found = Stranger(tmp_path / "place/sent", tmp_path / "place/outside", listener)
    found.sent.mkdir(parents=True)
    found.outside.joinpath("checkpoint").mkdir(parents=True)
    found.outside.joinpath("secret.txt").write_text("secret\n")
    found.outside.joinpath("evil.py").write_text(f"open({str(found.canary)!r}, 'w').close()\nclass Net: pass\n")
    monkeypatch.syspath_prepend(found.outside)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.chdir(found.outside)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "token")
    yield found
    listener.close()


Make = Callable[[Stranger], str]
"""Fills the folder that is sent, and returns a word that the refusal asks for."""


def pickled(of: Stranger) -> str:
    data = np.empty(1, dtype=object)
    data[0] = Pickle(of.canary)
    of.sent.joinpath("evil.npy").write_bytes(b"")
    np.save(of.sent / "evil.npy", data, allow_pickle=True)
    of.sweep("+hydra={callbacks:{x:{_target_:numpy.load,file:evil.npy,allow_pickle:true}}}", cwd=str(of.sent))
    return "numpy.load"


def says(word: str, *command: str, **record: Any) -> Make:
    """Return a sweep of that command, in which {canary}, {outside}, {sent}, {address} and {copied} are filled in."""

    def filled(text: str, of: Stranger) -> str:
        known = {"canary": of.canary, "outside": of.outside, "sent": of.sent, "address": of.address}
        for name, value in {**known, "copied": of.copied()}.items():
            text = text.replace(f"<{name}>", str(value))
        return text

    def make(of: Stranger) -> str:
        given = {key: filled(value, of) if isinstance(value, str) else value for key, value in record.items()}
        of.sweep(*(filled(each, of) for each in command), **given)
        return filled(word, of)

    return make


def linked(name: str, word: str = "") -> Make:
    def make(of: Stranger) -> str:
        of.sweep()
        of.sent.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        of.sent.joinpath(name).symlink_to(of.outside)
        return word or name

    return make


def pipe(of: Stranger) -> str:
    of.sweep()
    os.mkfifo(of.sent / "multirun.yaml")
    return "multirun.yaml"


def recorded_tracker(of: Stranger) -> str:
    of.sweep()
    tracker = {"kind": "mlflow", "uri": of.address}
    RunRecord.start(of.sent / "0", overrides=[], config={"tracker": tracker}, environment={})
    return of.address


def config_folder(of: Stranger) -> str:
    of.file("conf/config.yaml", "hydra:\n  searchpath: [pkg://evil]\n")
    of.sweep(f"--config-dir={of.sent / 'conf'}")
    return f"--config-dir={of.sent / 'conf'}"


def file_elsewhere(of: Stranger) -> str:
    of.outside.joinpath("x.yaml").write_text("# @package _global_\nseed: 1\n")
    group = Path(str(resources.files("offstage.conf"))).resolve() / "experiment"  # links are followed before ..
    above = os.path.relpath(of.outside.resolve(), group)
    of.sweep(f"experiment={above}/x")
    return f"experiment={above}/x"


def not_a_sweep(of: Stranger) -> str:
    SweepRecord(("hydra.mode=RUN", f"hydra.run.dir={of.canary}"), "/", "a.Sweeper", True, {}, ()).create(of.sent)
    of.sent.joinpath("0").symlink_to(of.outside)
    return "0"


TOKENIZER = ("model.path=<sent>", "model.tokenizer=<sent>", "model.trust_remote_code=true")
SWEEPS: dict[str, Make] = {
    "a pickle as a callback": pickled,
    "a callback": says("shutil.copyfile", "++hydra={callbacks:{x:<copied>}}"),
    "a callback key by key": says("evil.Net", "+hydra.callbacks.x._target_=evil.Net"),
    "a callback of an interpolation": says("${model.class}", "+hydra={callbacks:{x:{_target_:'${model.class}'}}}"),
    "a log of each job": says(
        "hydra.job_logging.handlers.file.filename=<canary>",
        "hydra.sweeper.params={hydra.job_logging.handlers.file.filename:<canary>}",
    ),
    "a log outside": says(
        "hydra.job_logging.handlers.file.filename=<canary>",
        "+hydra={job_logging:{handlers:{file:{filename:'<canary>'}}}}",
    ),
    "a handler of another class": says(
        "hydra.hydra_logging.handlers.console.class=evil.Net",
        "+hydra={hydra_logging:{handlers:{console:{class:evil.Net}}}}",
    ),
    "a variable": says("hydra.job.env_set.LD_PRELOAD=<sent>/evil.so", "+hydra.job.env_set.LD_PRELOAD=<sent>/evil.so"),
    "a launcher's command": says(
        'hydra.launcher.setup=["touch <canary>"]', "hydra/launcher=submitit_slurm",
        "hydra.launcher.setup=['touch <canary>']",
    ),
    "a launcher's folder": says("hydra.launcher.submitit_folder=<canary>", "hydra.launcher.submitit_folder=<canary>"),
    "a launcher of another class": says("evil.Net", "hydra.launcher._target_=evil.Net"),
    "another sweeper": says("evil.Net", "hydra.sweeper._target_=evil.Net"),
    "an optuna sampler of another class": says(
        "evil.Net", "hydra/sweeper=optuna", "hydra.sweeper.sampler._target_=evil.Net"
    ),
    "Hydra's copy of the config": says("hydra.output_subdir=../../outside/x", "hydra.output_subdir=../../outside/x"),
    "jobs outside": says("../outside/x", "hydra.sweep.subdir=../outside/x"),
    "jobs outside by a sum": says("<canary>/${hydra.job.num}", "hydra.sweep.subdir='<canary>/${hydra.job.num}'"),
    "a job's sweep outside": says("<canary>", "hydra.sweeper.params={hydra.sweep.dir:<canary>}"),
    "a job's config": says("evil.Net", "hydra.sweeper.params={model.class:evil.Net}"),
    "a class by an interpolation": says("evil.Net", "model.class='${generate.system}'", "generate.system=evil.Net"),
    "a module": says("shutil.copyfile", "model=module", "model._target_=torch.nn.Identity", "+model.x=<copied>"),
    "remote code of a tokenizer": says("remote-code", *TOKENIZER),
    "remote code in a search": says(
        "remote-code", "hydra/sweeper=optuna", "objective.metric=load_seconds", "hydra.sweeper.n_trials=1", *TOKENIZER
    ),
    "outputs": says("<canary>", "outputs=<canary>"),
    "outputs above": says("<sent>/../outside", "outputs=../outside", cwd="<sent>"),
    "outputs of a variable": says("<canary>/token", "outputs='<canary>/${oc.env:MLFLOW_TRACKING_TOKEN}'"),
    "a folder for weights": says("<canary>", "offload_folder=<canary>"),
    "the current folder": says("/", cwd="/"),
    "a file to read": says("<outside>/secret.txt", "generate.prompts_file=<outside>/secret.txt"),
    "an image": says("<outside>/secret.txt", "generate.prompts=[{prompt:a,images:['<outside>/secret.txt']}]"),
    "a checkpoint": says("<outside>/checkpoint", "model.path=<outside>/checkpoint"),
    "a checkpoint by a link": linked("ckpt/model.safetensors"),
    "a Hub id": says("org/name", "model.path=org/name"),
    "a server": says("<address>", "tracker=mlflow", "tracker.uri=<address>"),
    "a store": says("<canary>", "tracker=mlflow", "tracker.folder=<canary>"),
    "a server that a record names": recorded_tracker,
    "a job that is a link": linked("0"),
    "a record that is a link": linked("1/run.json"),
    "submitit's folder that is a link": linked(".submitit"),
    "a pipe in the place of a file": pipe,
    "a job's folder that is noted": says("../outside", jobs=(SweepJob(0, (), "../outside", "", ()),)),
    "a package to look in": says("pkg://evil", "hydra.searchpath=[pkg://evil]"),
    "a package of a folder's config": config_folder,
    "a main config": says("--config-path=pkg://evil", "--config-path=pkg://evil"),
    "a file of another folder": file_elsewhere,
    "a completion": says("--shell-completion", "--shell-completion"),
    "no sweep": not_a_sweep,
}  # fmt: skip


@pytest.mark.parametrize("case", SWEEPS)
def test_a_stranger_s_sweep_does_nothing_that_was_not_said(case: str, stranger: Stranger, capfd: Any) -> None:
    word = SWEEPS[case](stranger)
    before = stranger.found()
    GlobalHydra.instance().clear()
    with pytest.raises(SystemExit) as left:
        sweep(["resume", str(stranger.sent)])
    out, err = capfd.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1), err
    assert shlex.quote(f"--trust={word}") in err
    assert stranger.found() == before
    with pytest.raises(BlockingIOError):
        stranger.listener.accept()
    assert not list(stranger.sent.rglob("run.json")) or case in (
        "a record that is a link",
        "a server that a record names",
    )


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
    before = stranger.found()
    code, out, err = replay(path)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert shlex.quote(f"--trust={word}") in err
    assert stranger.found() == before


def test_a_replay_does_not_write_through_a_link(finished: Path, replay: Replay, stranger: Stranger) -> None:
    record = json.loads(finished.read_text())
    path = stranger.file("outputs/multirun/0/run.json", json.dumps({**record, "signature": None}))
    stranger.sent.joinpath("outputs/runs").symlink_to(stranger.outside)
    before = stranger.found()
    code, _, err = replay(path)
    assert (code, err.count("\n")) == (2, 1), err
    assert stranger.found() == before


def test_what_is_kept_of_a_stranger_s_run_is_looked_for_beside_it(
    finished: Path, replay: Replay, stranger: Stranger
) -> None:
    record = json.loads(finished.read_text())
    code, _, err = replay(stranger.file("run.json", json.dumps({**record, "signature": "00"})), "--from-cache")
    assert (code, record["stages"][0]["artifact"] in err) == (2, True), err


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
    before = stranger.found()
    report([str(stranger.sent)])
    assert "secret" not in stranger.sent.joinpath("report.json").read_text().replace(str(stranger.outside), "")
    assert stranger.found() == before


@pytest.mark.usefixtures("jobs_fork")
def test_a_stranger_s_harmless_sweep_is_carried_out(fresh_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert enter(fresh_folder, "-m", *HARMLESS, "hydra.sweep.dir=sent") == 0
    written = fresh_folder / "sent/sweep.json"
    record = SweepRecord.load(written.parent)
    assert record.is_own
    written.unlink()
    replace(record, cwd="/nowhere").create(written.parent)
    shutil.rmtree(written.with_name("0"))
    monkeypatch.chdir(fresh_folder)
    GlobalHydra.instance().clear()
    with pytest.raises(SystemExit) as left:
        sweep(["resume", "sent"])
    assert left.value.code == 0
    assert written.with_name("0").joinpath("run.json").exists()


@pytest.mark.usefixtures("jobs_fork")
def test_a_stranger_s_search_asks_before_it_looks_at_a_proposal(
    fresh_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    pytest.importorskip("optuna")
    search = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=1", "objective.metric=memory.predicted.cpu")
    assert enter(fresh_folder, "-m", *search, "seed=choice(1)", "stages=plan_only", "hydra.sweep.dir=sent") == 0
    written = fresh_folder / "sent/sweep.json"
    record = SweepRecord.load(written.parent)
    written.unlink()
    shutil.rmtree(written.with_name("0"))
    command = (*record.command, "model.class=choice(evil.Net)", "model.trust_remote_code=choice(true)")
    replace(record, command=command, jobs=()).create(written.parent)
    capfd.readouterr()
    monkeypatch.chdir(fresh_folder)
    GlobalHydra.instance().clear()
    with pytest.raises(SystemExit) as left:
        sweep(["resume", "sent"])
    _, err = capfd.readouterr()
    assert (left.value.code, err.count("\n")) == (2, 1), err
    assert "--trust=evil.Net --trust=remote-code" in err
