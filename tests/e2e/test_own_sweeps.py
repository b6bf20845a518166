"""Sweeps of one's own config files: they go on, until somebody has changed what they meant."""

from __future__ import annotations

import hashlib
import json
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
CHANGED = {
    "the sweep's": {"mine": "hydra: {callbacks: {x: {_target_: evil.Net}}}"},
    "that of one job": {"other": "hydra: {launcher: {cpus_per_task: 64}}"},
    "another file": {"mine": "defaults: [third]", "third": "seed: 5"},
}
"""What somebody else writes into experiments of the sweep."""


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
    record = SweepRecord.load(began)
    assert (record.files, record.is_own) == (expected.files, True)
    began.joinpath("0/run.json").unlink()
    experiment(began.parent, "later", "seed: 7")  # for another sweep
    monkeypatch.chdir("/")
    capfd.readouterr()
    assert resume(began) == 0, capfd.readouterr().err
    assert began.joinpath("0/run.json").is_file()


@pytest.mark.parametrize("case", CHANGED)
def test_a_sweep_whose_config_files_changed_is_refused(case: str, began: Path, capfd: Capture) -> None:
    for name, text in CHANGED[case].items():
        experiment(began.parent, name, text)
    code = resume(began)
    out, err = capfd.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "this config file isn't as it was when the sweep began" in err
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
    assert "its command isn't one that you gave on this machine" in capfd.readouterr().err
