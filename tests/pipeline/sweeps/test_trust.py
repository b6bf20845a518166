"""A folder from elsewhere may record any command: what it names is carried out only where the user says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_automatic_config_search_path

from offstage.pipeline.config import register
from offstage.pipeline.errors import ConfigError
from offstage.pipeline.record import RunRecord
from offstage.pipeline.sweeps.command import main
from offstage.pipeline.sweeps.record import SWEEP, SweepRecord
from offstage.pipeline.sweeps.sweep_keys import register_sweeps
from offstage.pipeline.sweeps.trust import named_by_folder, refuse_command, resume_command
from offstage.pipeline.trust import Trust
from tests.pipeline.sweeps.sample_sweeps import sweep_of


def began_with(*command: str) -> SweepRecord:
    return replace(sweep_of(1), command=command)


def judge(folder: Path, *arguments: str, trusted: tuple[str, ...] = (), own: bool = False) -> None:
    """Judge the command with these ``arguments`` as a resumed sweep's in ``folder``."""
    register_sweeps()
    register()
    loader = ConfigLoaderImpl(create_automatic_config_search_path(None, None, "pkg://offstage.conf"))
    refuse_command(Trust(folder, trusted, own), {}, loader, "config", [*arguments, f"hydra.sweep.dir={folder}"])


@pytest.mark.parametrize(
    ("argument", "word"),
    [
        ("+hydra.callbacks.x._target_=os.system", "os.system"),
        ("+hydra={callbacks:{x:{_target_:numpy.load,file:evil.npy,allow_pickle:true}}}", "numpy.load"),
        ("hydra.launcher.cpus_per_task=64", "hydra.launcher.cpus_per_task=64"),
        ("hydra.job.chdir=true", "hydra.job.chdir=true"),
        ("~hydra.job_logging.root", "~hydra.job_logging.root.level"),
        ("model.class=evil.Net", "evil.Net"),
        ("model.trust_remote_code=true", "remote-code"),
        ("++model={kind:module,_target_:'${vars.t}'} vars.t=evil.Net", "evil.Net"),
        ("++model.x='${vars.t}' vars.t._target_=evil.Net", "evil.Net"),
        ("model.path=/elsewhere", "/elsewhere"),
    ],
)
def test_what_a_command_composes_to_needs_the_user_s_word(argument: str, word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it names code to run, places outside its folder or settings") as refused:
        judge(tmp_path, *argument.split(" "))
    assert f"({word!r})" in str(refused.value)
    if not argument.startswith("~"):
        judge(tmp_path, *argument.split(" "), trusted=(word,))


@pytest.mark.parametrize(
    ("argument", "is_asked"),
    [
        ("model.path=/elsewhere", False),
        ("outputs=/a", False),
        ("hydra.job.chdir=true", False),
        ("model.class=a.B", True),
    ],
)
def test_who_gave_the_command_is_asked_for_code_alone(argument: str, is_asked: bool, tmp_path: Path) -> None:
    if is_asked:
        with pytest.raises(ConfigError, match=r"model.class \('a.B'\)"):
            judge(tmp_path, argument, own=True)
    else:
        judge(tmp_path, argument, own=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("hydra.sweeper.max_batch_size=2", "hydra/launcher=submitit_slurm", "stages=score"),
        ("experiment=least_budget", "hydra/sweeper/sampler=tpe", "hydra.sweeper.sampler.seed=3"),
        ("experiment=repeated_sweep", "hydra/job_logging=stdout", "model.path=inside", "hydra/launcher=basic"),
        ("vars={x: {_target_: os.system, trust_remote_code: true}, path: /elsewhere}",),
        ("generate.prompts=['/etc/passwd is a file']", "device_map=cpu", "hydra.sweep.subdir=job-${hydra.job.num}"),
    ],
)  # fmt: skip
def test_what_is_installed_is_not_asked_for(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    judge(tmp_path, *arguments)


def test_a_record_is_its_user_s_until_it_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    began_with("-m", "seed=1").signed().create(tmp_path)
    assert SweepRecord.load(tmp_path).is_own
    path = tmp_path / SWEEP
    path.write_text(path.read_text().replace("seed=1", "seed=2"))
    assert not SweepRecord.load(tmp_path).is_own
    path.write_text(path.read_text().replace("seed=2", "seed=1"))
    key = tmp_path / "data/offstage/signing_key"
    key.chmod(0o644)
    assert not SweepRecord.load(tmp_path).is_own, "others may know the key"
    key.chmod(0o600)
    assert SweepRecord.load(tmp_path).is_own
    key.write_bytes(b"another" * 5)
    assert not SweepRecord.load(tmp_path).is_own


@pytest.mark.parametrize(
    ("store", "is_asked"),
    [("http://mlflow.org", False), ("http://mlflow.or", True), ("http://x", True), ("/x", True), ("outputs/m", False)],
)
def test_a_tracker_that_the_user_s_command_does_not_name_is_asked_for(
    store: str, is_asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record = began_with("-m", "tracker.uri=http://mlflow.org/").signed()
    where = {"uri": store} if "://" in store else {"folder": str(tmp_path / store)}
    RunRecord.start(tmp_path / "0", overrides=[], config={"tracker": {"kind": "mlflow", **where}}, environment={})
    assert [each.word for each in named_by_folder(tmp_path, record)] == [store] * is_asked
    assert [each.word for each in named_by_folder(tmp_path, replace(record, signature=None))] != []


def test_a_search_s_longer_record_is_no_more_its_user_s_than_it_was(tmp_path: Path) -> None:
    began_with("-m").create(tmp_path)
    record = SweepRecord.load(tmp_path)
    record.extended(tmp_path, record.jobs[0])
    assert json.loads((tmp_path / SWEEP).read_text())["signature"] is None


def test_options_that_have_hydra_look_elsewhere_are_asked_for_however_they_are_written(tmp_path: Path) -> None:
    for command in (["-cd", "/x"], ["--config-d=/x"], ["--config-dir", "/x"]):
        assert [each.word for each in named_by_folder(tmp_path, began_with("-m", *command))] == ["--config-dir=/x"]


def test_the_command_that_resumes_says_what_is_trusted() -> None:
    record = sweep_of(2, code=("a.Net",))
    assert resume_command(Path("a b"), record) == "offstage-sweep resume 'a b' --trust=a.Net"


def test_a_folder_without_a_sweep_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["resume", str(tmp_path)])
    assert left.value.code == 5
    assert capsys.readouterr().err == f"offstage-sweep: {tmp_path}: no sweep.json there; give the folder of a sweep\n"
