"""The table of jobs: what streaming cost is told where a record holds it, and older records have no such columns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.report.quantities import MISSING
from pipeline.report.run_folders import find
from pipeline.report.table import job_table
from tests.pipeline.report.sample_runs import write_run

FIGURES: Mapping[str, float | str] = {
    "streamed_bytes_per_second": 1.9e9, "stall_seconds_per_token": 1.25, "bound": "storage", "stall_share": 0.314,
    "time_to_first_token_seconds": 2.5, "bound_seconds_per_token": 0.25, "predicted_seconds_per_token": 0.375,
}  # fmt: skip


def table(folder: Path) -> dict[str, tuple[str, ...]]:
    jobs = find([folder]).jobs
    return {", ".join(filter(None, (column.title, column.unit))): column.cells for column in job_table(jobs, ())}


def test_the_table_tells_how_fast_weights_came_and_what_was_waited_for(tmp_path: Path) -> None:
    write_run(tmp_path / "0", metrics=FIGURES)
    write_run(tmp_path / "1")
    found = table(tmp_path)
    assert found["streaming, GB/s"] == ("1.90", MISSING)
    assert found["stalled a token, s"] == ("1.250", MISSING)
    assert found["bound by"] == ("storage", MISSING)
    assert found["stalled, %"] == ("31.4", MISSING)


def test_the_table_has_the_prediction_and_the_bound_beside_what_was_measured(tmp_path: Path) -> None:
    write_run(tmp_path / "0", metrics=FIGURES)
    found = table(tmp_path)
    measured = ("first token, s", "time a token, ms", "predicted, ms", "bound, ms")
    assert [found[title] for title in measured] == [("2.500",), ("500.0",), ("375.0",), ("250.0",)]


def test_the_table_has_perplexities_to_the_digits_that_tell_jobs_apart(tmp_path: Path) -> None:
    for name, perplexity in (("0", 12.34561), ("1", 12.34568)):
        write_run(tmp_path / name, metrics={"perplexity": perplexity, "scored_tokens_per_second": 80.0})
    found = table(tmp_path)
    assert found["perplexity"] == ("12.3456", "12.3457")
    assert found["scored, tokens/s"] == ("80.00", "80.00")


def test_records_from_before_these_metrics_have_no_columns_for_them(tmp_path: Path) -> None:
    write_run(tmp_path / "0")
    assert not {"streaming, GB/s", "stalled a token, s", "bound by"} & set(table(tmp_path))
