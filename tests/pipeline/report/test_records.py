from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from offstage.pipeline.record import RecordError, read_run
from offstage.pipeline.run_schema import RunError
from tests.pipeline.report.sample_runs import write_failure, write_run


def write(folder: Path, content: object) -> Path:
    path = folder / "run.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_completed_run_is_read_whole(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "0", seconds=0.5) / "run.json")
    assert (run.status, run.reason) == ("completed", "")
    assert run.metric("decode_seconds_per_token") == 0.5
    assert run.metric("prefill_seconds") is None
    assert run.memory.budget == {"cpu": 1_000_000_000, "disk": None}
    assert [stage.name for stage in run.stages][-1] == "generate"
    assert run.outputs[0].token_ids == (1, 2, 3, 4)


def test_what_bound_a_run_is_read_where_its_record_holds_it(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "0", metrics={"bottleneck": "storage"}) / "run.json")
    assert (run.metrics["bottleneck"], run.metric("bottleneck")) == ("storage", None)
    assert read_run(write_run(tmp_path / "older") / "run.json").metrics.get("bottleneck") is None


def test_a_failed_run_says_where_and_why(tmp_path: Path) -> None:
    run = read_run(write_failure(tmp_path / "0", message="too small") / "run.json")
    assert (run.status, run.error) == ("failed", RunError("plan", "ValueError", "too small"))
    assert (run.reason, run.failure) == ("too small", "plan: too small")


def test_a_run_that_never_ended_says_how_far_it_came(tmp_path: Path) -> None:
    path = write(tmp_path, {"status": "running", "stages": [{"name": "plan"}]})
    os.utime(path, (0, 86_400 * 365))
    reason = read_run(path).reason
    assert "still at work or killed: last written 1971-01-01" in reason
    assert reason.endswith("after plan")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no JSON"),
        ('{"status": "comp', "no JSON"),
        ("\udcff", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ('{"status": "completed", "metrics": {"x": ' + "9" * 5000 + "}}", "no JSON"),
        ([], "no run record"),
        ({}, "no run record"),
        ({"status": 3}, "no run record"),
        ({"status": "completed", "schema_version": 9}, "schema_version 9"),
        ({"status": "completed", "stages": {}}, r"damaged: stages: \{\} isn't a list"),
        ({"status": "completed", "stages": [3]}, r"stages\.0: 3 isn't StageRun"),
        ({"status": "completed", "metrics": []}, r"metrics: \[\] isn't an object"),
        ({"status": "completed", "metric_table": [1]}, r"metric_table: \[1\] isn't an object"),
        ({"status": "completed", "outputs": ["text"]}, r"outputs\.0: 'text' isn't Output"),
        ({"status": "completed", "memory": {"budget": 3}}, r"memory\.budget: 3 isn't an object"),
    ],
)
def test_a_damaged_record_is_refused_with_its_reason(tmp_path: Path, content: object, words: str) -> None:
    path = tmp_path / "run.json"
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(RecordError, match=words):
        read_run(path)


@pytest.mark.parametrize("value", ["fast", True, None, [1], 10**400, float("nan"), float("inf")])
def test_what_is_no_number_is_not_known(tmp_path: Path, value: object) -> None:
    record = {"status": "completed", "metrics": {"x": value}, "stages": [{"seconds": value}]}
    run = read_run(write(tmp_path, record))
    assert run.metric("x") is None
    assert run.stages[0].seconds is None


def test_what_a_terminal_would_obey_is_made_visible(tmp_path: Path) -> None:
    outputs = [{"prompt": "\x1b[31m\u202eevil\ud800", "text": "line\nline\ttab", "token_ids": [1]}]
    answer = read_run(write(tmp_path, {"status": "completed", "outputs": outputs})).outputs[0]
    assert answer.title == "\ufffd[31m\ufffdevil\ufffd"
    assert answer.text == "line\nline\ttab"
