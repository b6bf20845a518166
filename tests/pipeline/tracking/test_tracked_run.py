"""What a tracker is told of a run, from its record."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from offstage.pipeline.record import RunRecord
from offstage.pipeline.run_schema import StageRun
from offstage.pipeline.stage import Report
from offstage.pipeline.tracking.tracked_run import MetricPoint, TrackedRun, metrics


def started(folder: Path, **config: Any) -> RunRecord:
    given = {"stages": ["plan", "generate"], "model": {"path": "/ckpt"}, "tracker": {"notes": "why"}, **config}
    environment = {"git_commit": "abc"}
    return RunRecord.start(folder / "day" / "1", overrides=["seed=1", "a=2"], config=given, environment=environment)


def with_plan(record: RunRecord, *, cached: bool = False) -> RunRecord:
    record.add_stage(StageRun(name="plan", key="", cached=cached, seconds=0.5, artifact=""))
    return record


def test_a_record_becomes_the_numbers_that_are_known(tmp_path: Path) -> None:
    record = with_plan(started(tmp_path))
    record.merge(Report(metrics={"load_seconds": 1.25, "bottleneck": "storage"}, memory={"measured": {"cpu": 10}}))
    record.note_series("cpu", [(0.5, 10)])
    assert metrics(record.run) == {"load_seconds": 1.25, "seconds/plan": 0.5, "memory/measured/cpu": 10.0}
    assert "x" not in metrics(replace(record.run, metrics={"x": math.nan}))


def test_a_run_that_ended_well_has_its_config_its_name_and_what_it_is_found_by(tmp_path: Path) -> None:
    record = with_plan(started(tmp_path, stop_after="plan"), cached=True)
    record.finish("completed")
    tracked = TrackedRun.of(record, host="here")
    assert (tracked.name, tracked.notes, tracked.files) == ("day/1", "why", (record.path,))
    assert tracked.params["model.path"] == "/ckpt"
    assert tracked.ended >= tracked.started > 10**12
    assert tracked.tags == {
        "overrides": "seed=1 a=2", "checkpoint": "/ckpt", "status": "completed", "cached": "true",
        "provenance": "measured earlier", "host": "here", "git_commit": "abc", "stage/plan": "cached",
    }  # fmt: skip


def test_a_run_that_failed_says_where_why_and_what_it_never_began(tmp_path: Path) -> None:
    record = started(tmp_path, stages=["plan", "dispatch", "generate"])
    with_plan(record).finish("failed", error=ValueError("no room"), stage="dispatch")
    tags = TrackedRun.of(record).tags
    assert tags["error"] == "dispatch: ValueError: no room"
    assert [tags[f"stage/{name}"] for name in ("plan", "dispatch", "generate")] == ["done", "failed", "not begun"]
    assert "host" not in tags


def test_a_run_whose_config_was_refused_has_nothing_but_its_error(tmp_path: Path) -> None:
    record = RunRecord.start(tmp_path, overrides=[], config={}, environment={})
    record.finish("failed", error=ValueError("seed: no"))
    assert TrackedRun.of(record).tags == {"status": "failed", "error": "ValueError: seed: no"}


def test_repeats_that_count_and_steps_of_a_training_are_points_of_their_own(tmp_path: Path) -> None:
    record = with_plan(started(tmp_path))
    repeats = [
        {
            "measured": f"2026-01-01T00:00:0{second}.500+00:00",
            "counts": counts,
            "metrics": {"s": second, "bottleneck": "x"},
        }
        for second, counts in ((1, True), (2, False), (3, True))
    ]
    steps = [{"loss": 2.0, "held_bytes": {"cpu": 7}}, {"loss": math.inf, "held_bytes": {"cpu": 8}}]
    record.merge(Report(repeats=tuple(repeats), steps=tuple(steps)))
    record.finish("completed")
    tracked = TrackedRun.of(record)
    first = 1767225601500
    assert [point for point in tracked.points if point.step] == [
        MetricPoint("repeat/s", 1.0, first, 1),
        MetricPoint("repeat/s", 3.0, first + 2000, 2),
        MetricPoint("step/loss", 2.0, tracked.ended, 1),
        MetricPoint("step/held_bytes/cpu", 7.0, tracked.ended, 1),
        MetricPoint("step/held_bytes/cpu", 8.0, tracked.ended, 2),
    ]
