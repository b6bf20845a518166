"""A job that was begun before: whoever is still at it is waited for, and what completed isn't run again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.job_folder import JobFolder
from offstage.pipeline.record import RECORD, RunRecord

OVERRIDES = ["seed=1"]


def leave(folder: Path, status: Any) -> None:
    record = RunRecord.start(folder, overrides=OVERRIDES, config={}, environment={})
    if status != "running":
        record.finish(status)


def test_what_completed_is_done_and_stays_as_it_is(tmp_path: Path) -> None:
    leave(tmp_path, "completed")
    before = tmp_path.joinpath(RECORD).read_bytes()
    with JobFolder(tmp_path) as folder:
        assert folder.taken()
        assert folder.has_completed(OVERRIDES)
    assert tmp_path.joinpath(RECORD).read_bytes() == before


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_what_did_not_complete_is_set_aside_each_time(status: str, tmp_path: Path) -> None:
    with JobFolder(tmp_path) as folder:
        assert folder.taken()
        assert not folder.has_completed(OVERRIDES)
        for _ in range(2):
            leave(tmp_path, status)
            assert not folder.has_completed(OVERRIDES)
    assert sorted(each.name for each in tmp_path.glob("run*")) == ["run-1.json", "run-2.json"]


def test_a_job_of_other_overrides_is_left_where_it_is(tmp_path: Path) -> None:
    leave(tmp_path, "completed")
    with JobFolder(tmp_path) as folder:
        assert folder.taken()
        assert not folder.has_completed(["seed=2"])
    assert tmp_path.joinpath(RECORD).exists()


def test_a_folder_is_free_when_the_last_process_that_works_in_it_has_ended(tmp_path: Path) -> None:
    with JobFolder(tmp_path) as folder:
        assert folder.taken()
        assert folder.lock is not None
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(folder.lock,))
    with JobFolder(tmp_path) as folder:
        assert not folder.taken(), "the job still works, though who waited for it is gone"
        child.communicate(b"\n")
        assert folder.taken()
