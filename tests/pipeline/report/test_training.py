"""What the report shows of a training."""

from __future__ import annotations

import json
from pathlib import Path

from offstage.pipeline.report.command import run
from tests.pipeline.report.pages import figures, markup
from tests.pipeline.report.sample_runs import write_run


def test_the_losses_of_trainings_are_drawn_and_stand_in_the_json(tmp_path: Path) -> None:
    write_run(tmp_path / "0", steps=[{"loss": 4.5, "seconds": 1.0}, {"loss": 4.0, "seconds": 1.0}])
    write_run(tmp_path / "1", steps=[{"loss": None}])
    write_run(tmp_path / "2")
    run([str(tmp_path)])
    page, told = markup(tmp_path / "report.html"), json.loads((tmp_path / "report.json").read_text())
    assert "Loss of each step" in page
    (line,) = figures(tmp_path / "report.html")["losses"]["data"]
    assert (line["x"], line["y"]) == ([1, 2], [4.5, 4.0])
    assert [[step["loss"] for step in job["steps"]] for job in told["jobs"]] == [[4.5, 4.0], [None], []]


def test_without_a_training_there_is_no_such_plot(tmp_path: Path) -> None:
    write_run(tmp_path / "0")
    run([str(tmp_path)])
    assert "Loss of each step" not in markup(tmp_path / "report.html")
