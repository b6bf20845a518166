"""The closing tables of a run: what was measured beside what was predicted, and nothing that isn't known."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from offstage.pipeline.installed_stages import declared_metrics
from offstage.pipeline.measurements import measurements, remarks
from offstage.pipeline.record import RunRecord
from offstage.pipeline.run_schema import StageRun
from offstage.pipeline.stage import Report

PREDICTED: dict[str, Any] = {
    "predicted_seconds_per_token": 0.5, "predicted_bottleneck": "storage", "predicted_streamed_bytes_per_token": 10**9,
}  # fmt: skip
MEASURED: dict[str, Any] = {
    "load_seconds": 1.5, "time_to_first_token_seconds": 2.0, "decode_seconds_per_token": 0.75, "bottleneck": "storage",
    "lower_bound_seconds_per_token": 0.25, "streamed_bytes_per_token": 5 * 10**8, "stall_share": 0.62,
}  # fmt: skip


def recorded(folder: Path, report: Report, *, cached: bool = False) -> RunRecord:
    record = RunRecord.start(folder, overrides=[], config={}, environment={})
    record.note_metrics(declared_metrics(["plan", "generate", "forward"]))
    record.add_stage(StageRun("last", "0" * 64, cached, 1.0, str(folder)))
    record.merge(report)
    return record


def shown(
    folder: Path, *, cached: bool = False, memory: Any = None, repeats: Sequence[Any] = (), **metrics: Any
) -> list[list[str]]:
    """Return the words of each line that the tables of such a record have."""
    record = recorded(folder, Report(metrics=metrics, memory=memory or {}, repeats=tuple(repeats)), cached=cached)
    console = Console(file=io.StringIO(), width=120)
    for table in measurements(record.run):
        console.print(table)
    return [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_what_was_measured_stands_beside_the_prediction_and_the_bound(tmp_path: Path) -> None:
    assert shown(tmp_path, **PREDICTED, **MEASURED) == [
        ["measured", "predicted", "lower", "bound"],
        ["loading", "1.500", "s"],
        ["time", "to", "first", "token", "2.000", "s"],
        ["time", "a", "token", "750.0", "ms", "500.0", "ms", "250.0", "ms"],
        ["streamed", "a", "token", "500.0", "MB", "1.00", "GB"],
        ["bottleneck", "storage", "storage"],
        ["stall", "share", "62.0", "%"],
    ]


def test_what_is_nothing_and_what_others_say_shorter_is_in_the_record_alone(tmp_path: Path) -> None:
    plain = {"decode_seconds_per_token": 0.75, "streamed_bytes_per_token": 0}
    nothing = {"stall_share": 0.0, "stall_seconds_per_token": 0.0, "load_seconds": 0.0}
    aside = {"stall_seconds_per_token": 0.5, "time_between_tokens_seconds_p90": 1.0, "streamed_bytes_per_second": 10**9}
    expected = shown(tmp_path / "a", **plain)
    assert expected[1:] == [["time", "a", "token", "750.0", "ms"], ["streamed", "a", "token", "0", "B"]]
    for name, said in {"b": nothing, "c": aside}.items():
        assert shown(tmp_path / name, **plain, **said) == expected


def test_a_plan_alone_shows_what_it_predicts(tmp_path: Path) -> None:
    lines = shown(tmp_path, memory={"predicted": {"0": 2 * 10**9, "cpu": 10**9, "disk": 5}}, **PREDICTED)
    assert lines[0] == ["predicted"]
    assert lines[-3:] == [["device", "predicted"], ["0", "2.00", "GB"], ["cpu", "1.00", "GB"]]


def test_each_device_has_its_peak_beside_what_was_predicted_and_no_budget_of_a_part_of_it(tmp_path: Path) -> None:
    memory = {"budget": {"cpu": 10**8, "disk": None}, "predicted": {"cpu": 10**9}, "measured": {"cpu": 9 * 10**8}}
    assert shown(tmp_path, memory=memory) == [
        ["device", "peak", "predicted"],
        ["cpu", "900.0", "MB", "1.00", "GB"],
    ]


def test_what_is_predicted_of_a_token_says_nothing_of_a_run_that_makes_none(tmp_path: Path) -> None:
    assert shown(tmp_path, forward_seconds=2.0, streamed_bytes_per_forward=10**9, **PREDICTED) == [
        ["measured"],
        ["forwards", "2.000", "s"],
        ["streamed", "a", "forward", "1.00", "GB"],
    ]


def test_figures_of_an_earlier_run_or_of_simulated_accelerators_are_called_so(tmp_path: Path) -> None:
    assert shown(tmp_path / "a", cached=True, **MEASURED)[0] == ["measured", "earlier", "lower", "bound"]
    simulated = shown(tmp_path / "b", simulated_accelerators=2, **MEASURED)[0]
    assert " ".join(simulated) == "measured (accelerators simulated) lower bound"


def test_a_record_without_figures_shows_no_table(tmp_path: Path) -> None:
    assert shown(tmp_path) == []


def repeat(seconds: float, *, earlier: bool = False, contended: bool = False) -> dict[str, Any]:
    metrics = {"decode_seconds_per_token": seconds}
    return {"earlier": earlier, "counts": True, "metrics": metrics, "processor": {"contended": contended}}


def test_several_repeats_show_how_many_there_are_and_how_far_they_spread(tmp_path: Path) -> None:
    given = [repeat(0.5, earlier=True), repeat(0.75), repeat(1.25), {"counts": False}]
    assert shown(tmp_path, repeats=given, decode_seconds_per_token=0.75)[:2] == [
        ["measured,", "median", "of", "3,", "1", "earlier", "least", "to", "largest"],
        ["time", "a", "token", "750.0", "ms", "0.500", "to", "1.250", "s"],
    ]


def test_what_others_took_is_said_below(tmp_path: Path) -> None:
    record = recorded(tmp_path, Report(repeats=(repeat(1.0, contended=True), repeat(1.0))), cached=True)
    assert [line.split(":")[0] for line in remarks(record.run)] == ["Others used the processor in 1 of 2 repeats"]


def test_of_one_sample_nobody_asked_how_far_it_is_to_be_trusted(tmp_path: Path) -> None:
    record = recorded(tmp_path, Report(repeats=(repeat(1.0, contended=True),)))
    assert not list(remarks(record.run))
    assert record.data["repeats"][0]["processor"]["contended"] is True


LINKS = {
    "transfer_bytes_per_token.0": 3 * 10**8, "transfer_bytes_per_token.1": 2 * 10**8,
    "predicted_transfer_bytes_per_token.0": 10**8,
    "transfer_stall_seconds_per_token.0": 0.25, "transfer_stall_seconds_per_token.1": 0.125,
}  # fmt: skip


def test_each_of_several_links_has_what_came_over_it_and_what_was_waited_for_it(tmp_path: Path) -> None:
    assert shown(tmp_path, **MEASURED, **LINKS)[-3:] == [
        ["streamed", "to", "a", "token", "a", "token,", "predicted", "stalled", "a", "token"],
        ["0", "300.0", "MB", "100.0", "MB", "250.0", "ms"],
        ["1", "200.0", "MB", "125.0", "ms"],
    ]


def test_the_only_link_is_told_by_the_figures_of_the_run(tmp_path: Path) -> None:
    only = {name: value for name, value in LINKS.items() if name.endswith(".0")}
    assert shown(tmp_path / "a", **MEASURED, **only) == shown(tmp_path / "b", **MEASURED)
