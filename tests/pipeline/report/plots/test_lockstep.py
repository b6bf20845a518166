"""How many batches share each pass against seconds a token."""

from __future__ import annotations

from pathlib import Path

import pytest

from offstage.pipeline.report.figures import Picture
from offstage.pipeline.report.plots.lockstep import lockstep_picture
from offstage.pipeline.report.run_folders import find
from offstage.pipeline.report.speed import members
from tests.pipeline.report.sample_runs import write_failure, write_run


def drawn(folder: Path) -> Picture | None:
    """Return the picture of the jobs below ``folder``."""
    return lockstep_picture(find([folder]).jobs)


def write_sweep(folder: Path, *asked: int | str | None) -> None:
    for number, count in enumerate(asked):
        chosen = {"lockstep": 16} if count == "auto" else {}
        shared = 16 if count == "auto" else int(count or 1)
        metrics = {**chosen, "predicted_seconds_per_token": 1 / shared, "bound_seconds_per_token": 0.1}
        write_run(folder / str(number), seconds=1.1 / shared, generate={"lockstep": count}, metrics=metrics)


def test_a_sweep_over_lockstep_is_drawn_against_how_many_share_a_pass(tmp_path: Path) -> None:
    write_sweep(tmp_path, None, 2, 4, "auto")
    picture = drawn(tmp_path)
    assert picture
    assert [key.text for key in picture.keys][:2] == ["measured", "predicted by the plan"]
    assert all(f">{count}<" in picture.wide for count in (1, 2, 4, 16))
    assert "batches that share a pass, logarithmic" in picture.wide


def test_each_other_setting_has_a_line_of_its_own_if_it_has_several_numbers(tmp_path: Path) -> None:
    write_sweep(tmp_path / "a", 1, 4)
    for number, count in enumerate((1, 2)):
        write_run(tmp_path / "b" / str(number), policy="optimal", generate={"lockstep": count})
    write_run(tmp_path / "c" / "0", policy="balanced", generate={"lockstep": 8})
    picture = drawn(tmp_path)
    assert picture
    assert [key.text for key in picture.keys][:2] == ["device_map=sequential", "device_map=optimal"]
    assert ">8<" not in picture.wide


def test_jobs_that_share_as_many_have_no_such_picture(tmp_path: Path) -> None:
    write_sweep(tmp_path, 4, 4)
    write_failure(tmp_path / "2")
    assert drawn(tmp_path) is None


@pytest.mark.parametrize(
    ("asked", "metrics", "told"),
    [(None, {}, 1), (1, {}, 1), (8, {}, 8), ("auto", {"lockstep": 3}, 3), ("auto", {}, None)],
)
def test_how_many_is_what_was_asked_for_or_chosen(
    asked: int | str | None, metrics: dict[str, float | str], told: int | None, tmp_path: Path
) -> None:
    write_run(tmp_path / "0", generate={"lockstep": asked}, metrics=metrics)
    (job,) = find([tmp_path]).jobs
    assert members(job.run) == told
