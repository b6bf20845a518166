"""The table of jobs: what streaming cost is told where a record holds it, and older records have no such columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from offstage.pipeline.record import read_run
from offstage.pipeline.report.command import run
from offstage.pipeline.report.comparison import ChangedValue, compare_runs
from offstage.pipeline.report.noise import noise
from offstage.pipeline.report.quantities import MISSING
from offstage.pipeline.report.run_folders import find
from offstage.pipeline.report.summary import summarise
from offstage.pipeline.report.table import job_table
from tests.pipeline.report.pages import markup
from tests.pipeline.report.sample_runs import write_failure, write_run

FIGURES: Mapping[str, float | str] = {
    "streamed_bytes_per_second": 1.9e9, "stall_seconds_per_token": 1.25, "bottleneck": "storage", "stall_share": 0.314,
    "time_to_first_token_seconds": 2.5, "lower_bound_seconds_per_token": 0.25, "predicted_seconds_per_token": 0.375,
}  # fmt: skip
PREDICTED: Mapping[str, float | str] = {
    "predicted_seconds_per_token": 0.375, "predicted_streamed_bytes_per_token": 3 * 10**9,
}  # fmt: skip


def table(folder: Path) -> dict[str, tuple[str, ...]]:
    jobs = find([folder]).jobs
    columns = job_table(jobs, (), noise(jobs))
    return {", ".join(filter(None, (column.title, column.unit))): column.cells for column in columns}


def test_the_table_tells_how_fast_weights_came_and_what_was_waited_for(tmp_path: Path) -> None:
    write_run(tmp_path / "0", metrics=FIGURES)
    write_run(tmp_path / "1")
    cells = table(tmp_path)
    assert cells["streaming, GB/s"] == ("1.90", MISSING)
    assert cells["stalled a token, s"] == ("1.250", MISSING)
    assert cells["bottleneck"] == ("storage", MISSING)
    assert cells["stall share, %"] == ("31.4", MISSING)


def test_the_table_has_the_prediction_and_the_bound_beside_what_was_measured(tmp_path: Path) -> None:
    write_run(tmp_path / "0", metrics=FIGURES)
    cells = table(tmp_path)
    measured = (
        "time to first token, s",
        "time a token, ms",
        "time a token, predicted, ms",
        "time a token, lower bound, ms",
    )
    assert [cells[title] for title in measured] == [("2.500",), ("500.0",), ("375.0",), ("250.0",)]


def test_the_table_has_all_that_a_plan_alone_predicts(tmp_path: Path) -> None:
    planned = {**PREDICTED, "predicted_bottleneck": "storage"}
    write_run(tmp_path / "0", seconds=None, streamed=None, metrics=planned)
    cells = table(tmp_path)
    titles = ("time a token, predicted, ms", "streamed a token, predicted, GB", "bottleneck, predicted")
    assert [cells[title] for title in titles] == [("375.0",), ("3.00",), ("storage",)]


def test_bytes_that_were_streamed_as_predicted_are_told_once(tmp_path: Path) -> None:
    write_run(tmp_path / "0", streamed=3 * 10**9, metrics=PREDICTED)
    assert table(tmp_path)["streamed a token, GB"] == ("3.00",)
    assert "streamed a token, predicted, GB" not in table(tmp_path)
    write_run(tmp_path / "1", streamed=2 * 10**9, metrics=PREDICTED)
    assert table(tmp_path)["streamed a token, predicted, GB"] == ("3.00", "3.00")


def test_a_comparison_tells_what_the_plans_predict_to_bind(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / bound, metrics={**PREDICTED, "predicted_bottleneck": bound}) / "run.json")
        for bound in ("storage", "host-to-device")
    ]
    speed = next(section for section in compare_runs(*runs).sections if section.title == "Speed")
    assert speed.changes == (ChangedValue("predicted_bottleneck", "storage", "host-to-device"),)


def test_the_table_has_perplexities_to_the_digits_that_tell_jobs_apart(tmp_path: Path) -> None:
    for name, perplexity in (("0", 12.34561), ("1", 12.34568)):
        write_run(tmp_path / name, metrics={"perplexity": perplexity, "scored_tokens_per_second": 80.0})
    cells = table(tmp_path)
    assert cells["perplexity"] == ("12.3456", "12.3457")
    assert cells["scored, tokens/s"] == ("80.00", "80.00")


def test_records_from_before_these_metrics_have_no_columns_for_them(tmp_path: Path) -> None:
    write_run(tmp_path / "0")
    newer = {"streaming, GB/s", "stalled a token, s", "bottleneck", "passes", "tokens a pass", "drafts verified"}
    assert not newer & set(table(tmp_path))


def test_jobs_that_share_passes_have_how_many_tokens_one_gave(tmp_path: Path) -> None:
    write_run(tmp_path / "0", metrics={"passes": 2}, tokens=[1, 2, 3, 4, 5])
    write_run(tmp_path / "1")
    cells = table(tmp_path)
    assert (cells["passes"], cells["tokens a pass"]) == (("2", MISSING), ("2.5000", MISSING))


def test_jobs_with_drafts_have_how_they_were_judged_and_how_many_stood(tmp_path: Path) -> None:
    drafts = {"speculation": "exact", "draft_acceptance": 0.625, "tokens_per_pass": 3.5}
    write_run(tmp_path / "0", metrics={**drafts, "passes": 40})
    write_run(tmp_path / "1")
    cells = table(tmp_path)
    assert cells["drafts verified"] == ("exact", MISSING)
    assert cells["drafts accepted, %"] == ("62.5", MISSING)
    assert cells["tokens a pass"] == ("3.5000", MISSING)


def test_a_budget_sorts_by_its_bytes_and_without_a_limit_last(tmp_path: Path) -> None:
    for number, budget in enumerate((3 * 10**9, 10**9)):
        write_run(tmp_path / str(number), budget=budget)
    record = json.loads((tmp_path / "1" / "run.json").read_text())
    record["memory"]["budget"]["cpu"] = None
    (tmp_path / "1" / "run.json").write_text(json.dumps(record))
    jobs = find([tmp_path]).jobs
    column = next(column for column in job_table(jobs, (), noise(jobs)) if column.title == "budget cpu")
    assert column.cells == ("3.00", "unlimited")
    assert column.values[0] == 3 * 10**9
    assert column.values[1] is not None
    assert column.values[1] > 10**18


def test_why_jobs_failed_is_told_once_for_each_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        write_failure(tmp_path / str(number), message="max_memory: too small")
    write_failure(tmp_path / "3", message="another reason")
    run([str(tmp_path)])
    page = markup(tmp_path / "report.html")
    assert page.count('<li id="failure-') == 2
    assert page.count("plan: max_memory: too small") == page.count("plan: another reason") == 1
    assert "#0, #1, #2 failed: plan: max_memory: too small" in capsys.readouterr().out


def test_a_run_over_hosts_has_the_peaks_of_each(tmp_path: Path) -> None:
    for number, count in enumerate((1, 3)):
        path = write_run(tmp_path / str(number)) / "run.json"
        record = json.loads(path.read_text())
        hosts = [
            {
                "record": "run.json",
                "cpu": "Xeon" if host else "EPYC",
                "memory": {"measured": {"cpu": host * 10**9, "0": host}},
            }
            for host in range(count)
        ]
        path.write_text(json.dumps(record | ({"hosts": hosts} if count > 1 else {})))
    summary = summarise(find([tmp_path]))
    peaks = {column.title: column.values for column in summary.table if "peak" in column.title}
    assert peaks == {
        "peak cpu": (1_400_000_000, 1_400_000_000),
        "host 1, peak 0": (None, 1),
        "host 1, peak cpu": (None, 10**9),
        "host 2, peak 0": (None, 2),
        "host 2, peak cpu": (None, 2 * 10**9),
    }
    conditions = {entry.key: entry.values for entry in summary.conditions}
    assert conditions["hosts"] == (("1x EPYC, 2x Xeon", ("#1",)),)


def test_of_hosts_that_were_planned_for_the_table_has_what_is_predicted_of_each(tmp_path: Path) -> None:
    path = write_run(tmp_path / "0") / "run.json"
    hosts = [{"memory": {"predicted": {"cpu": (1 + host) * 10**9}}} for host in range(2)]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hosts": hosts}))
    summary = summarise(find([tmp_path]))
    peaks = {column.title: column.values for column in summary.table if "predicted peak" in column.title}
    assert peaks == {"host 0, predicted peak cpu": (10**9,), "host 1, predicted peak cpu": (2 * 10**9,)}
    conditions = {entry.key: entry.values for entry in summary.conditions}
    assert conditions["hosts"] == (("2x planned for", ("#0",)),)


def test_the_table_tells_each_of_several_links(tmp_path: Path) -> None:
    names = ("transfer_bytes_per_token", "transfer_stall_seconds_per_token")
    write_run(tmp_path / "0", metrics={f"{name}.{device}": device + 1.0 for name in names for device in (0, 1)})
    write_run(tmp_path / "1", metrics={"transfer_bytes_per_token.0": 3.0})
    cells = table(tmp_path)
    assert cells["to 0, a token, B"] == ("1", "3")
    assert cells["to 1, a token, B"] == ("2", MISSING)
    assert cells["to 1, stalled a token, s"] == ("2.000", MISSING)
    run([str(tmp_path)])
    assert "metrics.transfer_bytes_per_token.1" in (tmp_path / "report.csv").read_text().splitlines()[0].split(",")
