"""Sweeps of one's own config files: they go on without a question, until somebody else has changed what they meant."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from offstage.pipeline.config_files import HEADER
from offstage.pipeline.sweeps.command import main as sweep
from offstage.pipeline.sweeps.record import SWEEP, SweepRecord
from tests.e2e.conftest import enter

Capture = pytest.CaptureFixture[str]
PLAN = f"{HEADER}\nstop_after: plan\n"
BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
CHANGED: dict[str, tuple[dict[str, str], str]] = {
    "a variable": (
        {"mine": "hydra: {job: {env_set: {LD_PRELOAD: evil.so}}}"}, "hydra.job.env_set.LD_PRELOAD=evil.so"
    ),
    "a log": (
        {"mine": "hydra: {job_logging: {handlers: {file: {filename: <outside>}}}}"},
        "hydra.job_logging.handlers.file.filename=<outside>",
    ),
    "a callback": ({"mine": "hydra: {callbacks: {x: {_target_: evil.Net}}}"}, "evil.Net"),
    "outputs of one job": ({"other": "outputs: <outside>"}, "<outside>"),
    "a launcher's setting of one job": (
        {"other": "hydra: {launcher: {cpus_per_task: 64}}"}, "hydra.launcher.cpus_per_task=64"
    ),
    "another file": ({"mine": "defaults: [third]", "third": "outputs: <outside>"}, "<outside>"),
}  # fmt: skip
"""What somebody else writes into experiments of the sweep, and the word that is asked for."""


def experiment(folder: Path, name: str, text: str = "") -> str:
    path = folder / f"conf/experiment/{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{PLAN}{text}\n")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a sweep that the user began, over two experiments that lie beside it; no job has run."""
    place, folder = tmp_path / "place", tmp_path / "place/run"
    folder.mkdir(parents=True)
    files = {f"experiment/{name}": experiment(place, name) for name in ("mine", "other")}
    words = ("-m", "--config-dir", "conf", "experiment=mine,other")
    SweepRecord(words, str(place), BASIC, foreseen=True, base={}, jobs=(), files=files).signed().create(folder)
    monkeypatch.chdir(tmp_path)
    return folder


def resume(folder: Path) -> int:
    GlobalHydra.instance().clear()
    with pytest.raises(SystemExit) as left:
        sweep(["resume", str(folder)])
    return int(left.value.code or 0)


@pytest.mark.usefixtures("jobs_fork")
def test_a_sweep_of_one_s_own_config_files_is_resumed_without_a_question(
    began: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    expected = SweepRecord.load(began)
    shutil.rmtree(began)
    assert enter(began.parent, *expected.command, "hydra.sweep.dir=run") == 0
    found = SweepRecord.load(began)
    assert (found.files, found.is_own) == (expected.files, True)
    began.joinpath("0/run.json").unlink()
    experiment(began.parent, "later", "seed: 7")  # for another sweep
    monkeypatch.chdir("/")
    capfd.readouterr()
    assert resume(began) == 0, capfd.readouterr().err
    assert began.joinpath("0/run.json").is_file()


@pytest.mark.parametrize("case", CHANGED)
def test_what_somebody_changed_of_its_config_files_is_asked_for(case: str, began: Path, capfd: Capture) -> None:
    outside = began.parent.with_name("outside")
    texts, word = CHANGED[case]
    for name, text in texts.items():
        experiment(began.parent, name, text.replace("<outside>", str(outside)))
    code = resume(began)
    out, err = capfd.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert shlex.quote(f"--trust={word.replace('<outside>', str(outside))}") in err
    assert not outside.exists()
    assert [path.name for path in began.iterdir()] == [SWEEP]


@pytest.mark.parametrize("field", ["files", "base"])
def test_who_changes_what_its_record_is_signed_for_makes_it_a_stranger_s(
    field: str, began: Path, capfd: Capture
) -> None:
    changed = {"experiment/mine": experiment(began.parent, "mine", "hydra: {job: {env_set: {LD_PRELOAD: evil.so}}}")}
    record = json.loads(began.joinpath(SWEEP).read_text())
    record[field] |= changed
    began.joinpath(SWEEP).write_text(json.dumps(record))
    assert not SweepRecord.load(began).is_own
    assert resume(began) == 2
    assert "--trust=--config-dir=conf" in capfd.readouterr().err
