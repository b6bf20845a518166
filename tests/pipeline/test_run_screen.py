"""What a run shows, in the end or while it goes on: the same lines, each once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.record import RunRecord
from offstage.pipeline.run_schema import StageRun
from offstage.pipeline.run_screen import RunScreen
from offstage.pipeline.stage import Report

FIRST, LAST = "plan", "generate"
PLAN = Report(summary="cpu 1 B [bold]", screen="[red] what lies \x1b[2Jwhere")
ANSWER = Report(summary="2 tokens", screen="Once upon a time", remarks=("Other [bits] may come.",))


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    record = RunRecord.start(tmp_path, overrides=[], config={"stages": [FIRST, LAST]}, environment={})
    record.add_stage(StageRun(FIRST, "0" * 64, True, 1.0, str(tmp_path), 10**6))
    return record


def ended(record: RunRecord) -> RunRecord:
    record.add_stage(StageRun(LAST, "1" * 64, False, 12.5, "", 10**8))
    record.merge(Report(metrics={"load_seconds": 1.0}))
    return record


def test_a_run_ends_with_its_stages_what_they_have_to_show_and_what_was_measured(
    record: RunRecord, capsys: Any
) -> None:
    with RunScreen(ended(record)) as screen:
        pass
    screen.finish({FIRST: PLAN, LAST: ANSWER}, "closing [line]")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "stage     seconds          host peak",
        "plan         1.00  cached     1.0 MB  cpu 1 B [bold]",
        "generate    12.50  made     100.0 MB  2 tokens",
        "",
        "[red] what lies \ufffd[2Jwhere",
        "",
        "Once upon a time",
        "",
        "         measured",
        "loading   1.000 s",
        "",
        "Other [bits] may come.",
        "",
        "closing [line]",
    ]


def test_what_a_stage_shows_at_work_stands_below_the_stages_before_it_and_not_again(
    record: RunRecord, capsys: Any
) -> None:
    with RunScreen(record) as screen:
        for text in ("Once", " upon\r", " a time"):
            screen.show_text(LAST, text, {FIRST: PLAN})
        ended(record)
    screen.finish({FIRST: PLAN, LAST: ANSWER}, "closing")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:9] == [
        "stage     seconds          host peak",
        "plan         1.00  cached     1.0 MB  cpu 1 B [bold]",
        "",
        "[red] what lies \ufffd[2Jwhere",
        "",
        "Once upon a time",
        "",
        "generate    12.50  made     100.0 MB  2 tokens",
        "",
    ]
    assert lines[9:] == ["         measured", "loading   1.000 s", "", *ANSWER.remarks, "", "closing"]


def cut_short(record: RunRecord) -> None:
    with RunScreen(record) as screen:
        screen.show_text(LAST, "Once", {FIRST: PLAN})
        raise KeyboardInterrupt


def test_a_text_that_is_cut_short_ends_its_line(record: RunRecord, capsys: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        cut_short(record)
    assert capsys.readouterr().out.endswith("\nOnce\n")
