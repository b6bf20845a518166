from __future__ import annotations

import os
from pathlib import Path

import pytest

from offstage.pipeline.errors import StorageError
from offstage.pipeline.report.run_folders import find, find_one
from tests.pipeline.report.sample_runs import write_run, write_sweep


def test_a_sweeps_jobs_keep_their_numbers_in_order(tmp_path: Path) -> None:
    for number in (10, 2, 0):
        write_run(tmp_path / "sweep" / str(number))
    assert [job.name for job in find([tmp_path / "sweep"]).jobs] == ["#0", "#2", "#10"]


def test_runs_of_several_sweeps_are_numbered_anew_and_counted_once(tmp_path: Path) -> None:
    for sweep in ("a", "b"):
        write_run(tmp_path / sweep / "0")
    runs = find([tmp_path, tmp_path / "a", tmp_path / "b" / "0", tmp_path / "b" / "0" / "run.json"])
    assert [(job.name, job.run.folder.parent.name) for job in runs.jobs] == [("#0", "a"), ("#1", "b")]


def test_a_job_without_a_record_and_a_broken_one_are_named(tmp_path: Path) -> None:
    write_run(tmp_path / "0")
    (tmp_path / "1" / ".hydra").mkdir(parents=True)
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "run.json").write_text("{")
    (tmp_path / "3" / "run.json").mkdir(parents=True)
    runs = find([tmp_path])
    assert len(runs.jobs) == 1
    assert [(problem.path.parent.name, problem.reason.split(":")[0]) for problem in runs.problems] == [
        ("1", "missing"),
        ("2", "no JSON that can be read"),
        ("3", "a folder, not a file"),
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "0")
    (tmp_path / "1").mkdir(mode=0)
    assert "denied" in find([tmp_path]).problems[0].reason


def test_where_there_is_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="there is nothing"):
        find([tmp_path / "gone"])
    with pytest.raises(StorageError, match=r"no run\.json there"):
        find([tmp_path])


def test_one_run_is_wanted_and_a_sweep_is_given(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    assert find_one(tmp_path / "0").folder == tmp_path / "0"
    with pytest.raises(StorageError, match="8 runs there"):
        find_one(tmp_path)
    (tmp_path / "0" / "run.json").write_text("{")
    with pytest.raises(StorageError, match="no JSON"):
        find_one(tmp_path / "0")
