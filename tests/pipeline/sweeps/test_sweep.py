"""A sweep's record, and who may go on with it: the same sweep, and one process at a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.errors import ConfigError, StorageError
from offstage.pipeline.record import RunRecord
from offstage.pipeline.sweeps.command import main
from offstage.pipeline.sweeps.record import SWEEP, Sweep, SweepRecord
from tests.pipeline.sweeps.sample_sweeps import sweep_of


def finish_job(folder: Path, number: int, status: Any) -> None:
    record = RunRecord.start(folder / str(number), overrides=[f"seed={number}"], config={}, environment={})
    if status != "running":
        record.finish(status)


def test_a_sweep_is_written_whole_before_anything_of_it_runs(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "new", sweep_of(3))
    assert not sweep.resumed
    assert SweepRecord.load(tmp_path / "new") == sweep_of(3)


def test_only_what_completed_is_done(tmp_path: Path) -> None:
    Sweep(tmp_path, sweep_of(5)).close()
    for number, status in enumerate(("completed", "failed", "interrupted", "running")):
        finish_job(tmp_path, number, status)
    resumed = Sweep(tmp_path, sweep_of(5))
    assert resumed.resumed
    assert [resumed.has_completed(number) for number in range(5)] == [True, False, False, False, False]


def test_the_record_of_another_job_says_nothing_of_this_one(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, sweep_of(2))
    finish_job(tmp_path, 1, "completed")
    tmp_path.joinpath("1").rename(tmp_path / "0")
    assert not sweep.has_completed(0)


def test_of_several_that_go_on_with_one_sweep_one_does(tmp_path: Path) -> None:
    first = Sweep(tmp_path, sweep_of(2))
    with pytest.raises(StorageError, match="another process is at this sweep; wait for it to end"):
        Sweep(tmp_path, sweep_of(2))
    first.close()
    assert Sweep(tmp_path, sweep_of(2)).resumed


def other(count: int = 3, **changes: Any) -> SweepRecord:
    return replace(sweep_of(count), **changes)


def changed_job(**changes: Any) -> SweepRecord:
    first, second, third = sweep_of(3).jobs
    return other(jobs=(first, replace(second, **changes), third))


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (other(4), "3 jobs there, 4 here"),
        (changed_job(overrides=("seed=7",)), "override 1 of job 1 is 'seed=1' there, 'seed=7' here"),
        (changed_job(overrides=("seed=1", "dtype=auto")), "override 2 of job 1 is None there, 'dtype=auto' here"),
        (other(base={"dtype": "auto", "model": {"path": "/else"}}), "model.path is '/ckpt' there, '/else' here"),
        (other(cwd="/"), "the folder that its command ran in is"),
        (changed_job(config="another"), "the config of job 1, of files that changed since, is"),
        (changed_job(folder="one"), "the folder of job 1 is '1' there, 'one' here"),
        (other(sweeper="b.Sweeper"), "hydra.sweeper is 'a.Sweeper' there, 'b.Sweeper' here"),
    ],
)
def test_another_sweep_is_refused_by_its_first_difference(here: SweepRecord, words: str, tmp_path: Path) -> None:
    Sweep(tmp_path, sweep_of(3)).close()
    with pytest.raises(ConfigError) as caught:
        Sweep(tmp_path, here)
    assert words in str(caught.value)
    assert "choose another folder" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert SweepRecord.load(tmp_path) == sweep_of(3)


def test_a_sweep_that_was_moved_is_the_same_sweep(tmp_path: Path) -> None:
    Sweep(tmp_path, other(cwd="/nowhere any more")).close()
    assert Sweep(tmp_path, sweep_of(3)).resumed


def test_runs_that_no_sweep_tells_of_are_left_alone(tmp_path: Path) -> None:
    finish_job(tmp_path, 1, "completed")
    with pytest.raises(StorageError, match=r"1: a run lies here, and no sweep\.json .* choose another folder"):
        Sweep(tmp_path, sweep_of(3))
    assert [each.name for each in tmp_path.iterdir()] == ["1"]


def test_jobs_that_follow_from_others_are_added_as_they_come(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, replace(sweep_of(2), jobs=(), foreseen=False))
    assert sweep.job(0) is None
    sweep.expect(sweep_of(2).jobs[0])
    assert SweepRecord.load(tmp_path).jobs == sweep_of(1).jobs
    sweep.close()
    resumed = Sweep(tmp_path, replace(sweep_of(2), jobs=(), foreseen=False))
    resumed.expect(sweep_of(2).jobs[0])
    with pytest.raises(ConfigError, match="override 1 of job 0 is 'seed=0' there, 'seed=1' here"):
        resumed.expect(replace(sweep_of(2).jobs[1], number=0))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda sweep: sweep | {"schema_version": 1}, "not of schema version 2"),
        (
            lambda sweep: sweep | {"jobs": [{"number": 1}]},
            ".jobs.0: {'number': 1} isn't SweepJob: an object",
        ),
        (lambda sweep: sweep | {"command": "rm"}, ".command: 'rm' isn't a list"),
        (lambda sweep: sweep | {"more": 1}, "isn't SweepRecord: an object of command, cwd"),
        (lambda sweep: [], "not of schema version"),
    ],
)
def test_a_damaged_record_is_one_line(damage: Any, words: str, tmp_path: Path) -> None:
    Sweep(tmp_path, sweep_of(1)).close()
    path = tmp_path / SWEEP
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    with pytest.raises(StorageError, match="give the folder of another sweep") as caught:
        SweepRecord.load(tmp_path)
    assert words in str(caught.value)


def test_a_record_is_its_user_s_until_it_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    replace(sweep_of(1), command=("-m", "seed=1")).signed().create(tmp_path)
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


def test_a_search_s_longer_record_is_no_more_its_user_s_than_it_was(tmp_path: Path) -> None:
    sweep_of(1).create(tmp_path)
    record = SweepRecord.load(tmp_path)
    record.extended(tmp_path, record.jobs[0])
    assert json.loads((tmp_path / SWEEP).read_text())["signature"] is None


def test_a_folder_without_a_sweep_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["resume", str(tmp_path)])
    assert left.value.code == 5
    assert capsys.readouterr().err == f"offstage-sweep: {tmp_path}: no sweep.json there; give the folder of a sweep\n"
