"""The report's numbers, worked out a second time from the records alone, with nothing but json."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.report.command import run
from tests.e2e.conftest import enter
from tests.pipeline.report.pages import figures
from tests.pipeline.report.sample_runs import write_sweep


def records(sweep: Path) -> list[dict[str, Any]]:
    paths = sorted(sweep.glob("*/run.json"), key=lambda path: int(path.parent.name))
    return [json.loads(path.read_text()) for path in paths]


@pytest.fixture(scope="module", params=["made", "run"])
def sweep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep with its report: of made-up records, and of real ones on the embedded model."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "made":
        write_sweep(folder, metrics={"storage_bandwidth_bytes_per_second": 1.6e9, "predicted_seconds_per_token": 0.7})
    else:
        for number, budget in enumerate(("0.1MB", "3.8MB", "8MB")):
            job = (f"max_memory.cpu={budget}", "device_map=sequential", f"hydra.run.dir={folder / str(number)}")
            enter(folder, *job, f"outputs={folder / 'out'}")
    run([str(folder)])
    return folder


@pytest.fixture(scope="module")
def report(sweep: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((sweep / "report.json").read_text())
    return content


@pytest.fixture(scope="module")
def rows(sweep: Path) -> list[dict[str, str]]:
    with (sweep / "report.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_number_of_the_csv_is_the_records(sweep: Path, rows: list[dict[str, str]]) -> None:
    known = records(sweep)
    assert len(rows) == len(known) >= 3
    for row, record in zip(rows, known, strict=True):
        assert row["status"] == record["status"]
        for name, value in record["metrics"].items():
            assert row[f"metrics.{name}"] == ("" if value is None else str(value))
        for section in ("budget", "predicted", "measured"):
            for device, value in record["memory"][section].items():
                assert row[f"{section}_bytes.{device}"] == ("" if value is None else str(value))
        for stage in record["stages"]:
            assert float(row[f"seconds.{stage['name']}"]) == stage["seconds"]
            assert row[f"cached.{stage['name']}"] == str(stage["cached"])


def test_the_curves_are_the_records(sweep: Path, report: dict[str, Any]) -> None:
    expected = {"measured": set(), "predicted": set(), "lower_bound": set()}  # type: dict[str, set[tuple[float, float]]]
    for record in records(sweep):
        figures, budget = record["metrics"], record["memory"]["budget"].get("cpu")
        seconds = figures.get("decode_seconds_per_token")
        if seconds is None or budget is None:
            continue
        expected["measured"].add((budget, seconds))
        if figures.get("predicted_seconds_per_token") is not None:
            expected["predicted"].add((budget, figures["predicted_seconds_per_token"]))
        if figures.get("lower_bound_seconds_per_token") is not None:
            expected["lower_bound"].add((budget, figures["lower_bound_seconds_per_token"]))
    (checkpoint,) = report["checkpoints"]
    for name, points in expected.items():
        series = checkpoint["seconds_per_token_by_budget"]
        drawn = {(point["x"], point["y"]) for each in series for point in each[name]}
        assert drawn == points, name
    assert expected["measured"]


def test_every_number_of_the_pictures_is_the_records(sweep: Path) -> None:
    drawn, known = figures(sweep / "report.html"), records(sweep)
    completed = [record for record in known if record["memory"]["measured"]]
    at_work = [record for record in known if record["metrics"].get("decode_seconds_per_token") is not None]
    speed = [trace for trace in drawn["speed"]["data"] if "error_y" in trace]
    assert {(x, y) for trace in speed for x, y in zip(trace["x"], trace["y"], strict=True)} == {
        (record["memory"]["budget"]["cpu"], record["metrics"]["decode_seconds_per_token"]) for record in at_work
    }
    front = [pair for trace in drawn["pareto"]["data"] for pair in zip(trace["x"], trace["y"], strict=True)]
    assert set(front) == {
        (record["memory"]["measured"]["cpu"], record["metrics"]["decode_tokens_per_second"]) for record in at_work
    }
    bars = [trace for trace in drawn["memory"]["data"] if trace["type"] == "bar"]
    peaks = [sum(parts) for parts in zip(*(trace["x"] for trace in bars), strict=True)]
    assert peaks == [record["memory"]["measured"]["cpu"] for record in completed]
    (predicted,) = [trace for trace in drawn["memory"]["data"] if trace["name"] == "predicted peak"]
    assert predicted["x"] == [record["memory"]["predicted"]["cpu"] for record in completed]


def test_every_second_of_the_stages_is_the_records(sweep: Path) -> None:
    rows = [record for record in records(sweep) if record["stages"]]
    drawn = {
        (row, trace["name"]): seconds
        for trace in figures(sweep / "report.html")["stages"]["data"]
        for row, seconds in zip(trace["y"], trace["x"], strict=True)
    }
    assert drawn == {
        (row, stage["name"]): stage["seconds"] for row, record in enumerate(rows) for stage in record["stages"]
    }


def test_the_front_is_what_no_other_job_beats(sweep: Path, report: dict[str, Any]) -> None:
    points = {}
    for number, record in enumerate(records(sweep)):
        rate, measured = record["metrics"].get("decode_tokens_per_second"), record["memory"]["measured"]
        memory = sum(count for device, count in measured.items() if device != "disk" and count is not None)
        if rate is not None and memory:
            points[f"#{number}"] = (memory, rate)
    beaten = {
        job
        for job, (memory, rate) in points.items()
        if any(m <= memory and r >= rate and (m, r) != (memory, rate) for m, r in points.values())
    }
    (checkpoint,) = report["checkpoints"]
    assert {point["job"] for point in checkpoint["pareto_front"]} == points.keys() - beaten


def test_every_job_that_did_not_complete_stands_there_with_its_reason(sweep: Path, report: dict[str, Any]) -> None:
    known = {f"#{number}": record for number, record in enumerate(records(sweep))}
    expected = {name for name, record in known.items() if record["status"] != "completed"}
    assert {failure["job"] for failure in report["failures"]} == expected != set()
    for failure in report["failures"]:
        message = known[failure["job"]]["error"]["message"]
        assert " ".join(message.split()) in failure["reason"]
        assert failure["reason"]
