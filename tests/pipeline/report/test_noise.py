"""Jobs with several repeats: which differences are within the noise, and how the report shows the spread."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.record import RecordError, read_run
from offstage.pipeline.report.command import run
from offstage.pipeline.report.noise import noise, rank_test
from offstage.pipeline.report.run_folders import find
from tests.pipeline.report.pages import markup
from tests.pipeline.report.sample_runs import repeat, write_run

FAST, SLOW = [0.50, 0.51, 0.52, 0.53, 0.54], [0.60, 0.61, 0.62, 0.63, 0.64]


@pytest.mark.parametrize(
    ("one", "other", "probability"),
    [
        ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], 2 / 252),
        ([6, 7, 8, 9, 10], [1, 2, 3, 4, 5], 2 / 252),
        ([1, 3, 5], [2, 4, 6], 14 / 20),
        ([1, 2, 3, 4], [5, 6, 7, 8], 2 / 70),
        ([1, 1, 1], [1, 1, 1], 1.0),
        ([1], [2], 1.0),
    ],
)
def test_the_rank_test_says_what_chance_does(one: list[int], other: list[int], probability: float) -> None:
    assert rank_test(one, other) == pytest.approx(probability)


def write_jobs(folder: Path, *jobs: list[dict[str, Any]], cached: bool = False) -> Path:
    for number, repeats in enumerate(jobs):
        times = sorted(one["metrics"]["decode_seconds_per_token"] for one in repeats if one["counts"])
        seconds = times[len(times) // 2]
        write_run(
            folder / str(number), budget=(number + 1) * 10**9, seconds=seconds, peak=(number + 1) * 10**9,
            repeats=repeats, cached=cached, metrics={"time_between_tokens_seconds_p90": 1.5 * seconds},
        )  # fmt: skip
    return folder


def test_differences_within_the_noise_are_named(tmp_path: Path) -> None:
    near = [seconds + 0.005 for seconds in FAST]
    folder = write_jobs(tmp_path, *([repeat(seconds) for seconds in times] for times in (FAST, near, SLOW)))
    within = noise(find([folder]).jobs)
    assert within.like == {"#0": ("#1",), "#1": ("#0",), "#2": ()}
    assert (within.pairs, within.within, within.undecided) == (3, 1, 0)
    assert within.describe().startswith("Of 3 pairs of jobs 2 differ")


def test_too_few_samples_tell_nothing_and_other_models_are_not_compared(tmp_path: Path) -> None:
    few = write_jobs(tmp_path / "few", [repeat(0.5), repeat(0.6)], [repeat(1.5), repeat(1.6)], [repeat(9.0)])
    within = noise(find([few]).jobs)
    assert (within.pairs, within.within, within.undecided) == (1, 1, 1)
    assert "too few repeats to tell" in within.describe()
    two = write_jobs(tmp_path / "two", *([repeat(seconds) for seconds in times] for times in (FAST, SLOW)))
    record = two / "1/run.json"
    record.write_text(record.read_text().replace("/ckpt", "/another"))
    assert noise(find([two]).jobs).describe() == ""


def test_jobs_that_were_served_the_same_samples_are_no_pair(tmp_path: Path) -> None:
    served = [repeat(seconds, earlier=True) for seconds in FAST]
    write_jobs(tmp_path, [repeat(seconds) for seconds in FAST], served, [repeat(seconds) for seconds in SLOW])
    within = noise(find([tmp_path]).jobs)
    assert (within.pairs, within.within) == (2, 0)
    assert within.like["#1"] == ()


def test_the_report_has_medians_spreads_busy_jobs_and_what_is_within_the_noise(tmp_path: Path, capsys: Any) -> None:
    disturbed = [repeat(seconds, contended=seconds > 0.62, earlier=seconds < 0.61) for seconds in SLOW]
    write_jobs(tmp_path, [repeat(seconds) for seconds in FAST], [*disturbed, repeat(9.0, counts=False)])
    run([str(tmp_path)])
    page, report = markup(tmp_path / "report.html"), json.loads((tmp_path / "report.json").read_text())
    assert "Repeats of each job" in page
    assert "Of 1 pairs of jobs 1 differ" in page
    assert "Of 1 pairs of jobs 1 differ" in " ".join(capsys.readouterr().out.split())
    assert "taken while others used the processor" in page
    assert "5, 1 earlier, 2 contended" in page
    assert "others used the processor meanwhile" in page
    (series,) = report["checkpoints"][0]["seconds_per_token_by_budget"]
    assert [(point["least"], point["y"], point["largest"]) for point in series["measured"]] == [
        (0.50, 0.52, 0.54),
        (0.60, 0.62, 0.64),
    ]
    assert [point["contended"] for point in series["measured"]] == [False, True]
    assert [len(job["repeats"]) for job in report["jobs"]] == [5, 6]
    rows = list(csv.DictReader((tmp_path / "report.csv").read_text().splitlines()))
    assert [row["provenance"] for row in rows] == ["measured, median of 5", "measured, median of 5, 1 earlier"]


def test_what_an_earlier_run_measured_is_hollow_and_said(tmp_path: Path) -> None:
    folder = write_jobs(tmp_path, [repeat(0.5)], [repeat(0.6, earlier=True)])
    run([str(folder)])
    page, report = markup(tmp_path / "report.html"), json.loads((tmp_path / "report.json").read_text())
    assert page.count("A hollow mark was measured by an earlier run.") == 2, "in the plots of speed"
    assert [point["cached"] for point in report["checkpoints"][0]["seconds_per_token_by_budget"][0]["measured"]] == [
        False,
        True,
    ]
    assert [job["provenance"] for job in report["jobs"]] == ["measured", "measured earlier"]
    assert "completed, cached" in page


def test_records_without_samples_go_by_whether_the_last_stage_was_cached(tmp_path: Path) -> None:
    assert read_run(write_run(tmp_path / "0", cached=True) / "run.json").provenance.is_cached
    assert not read_run(write_run(tmp_path / "1") / "run.json").provenance.is_cached


def test_samples_of_another_shape_make_no_record(tmp_path: Path) -> None:
    path = write_run(tmp_path / "0") / "run.json"
    for repeats, words in (
        ({"a": 1}, r"repeats: \{'a': 1\} isn't a list"),
        ([3], r"repeats\.0: 3 isn't Repeat"),
        ([{"metrics": 3}], r"repeats\.0\.metrics: 3 isn't an object"),
    ):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"repeats": repeats}))
        with pytest.raises(RecordError, match=words):
            read_run(path)


def test_a_cap_that_nothing_tested_is_said_in_the_table(tmp_path: Path) -> None:
    path = write_run(tmp_path / "0", cached=True) / "run.json"
    untested = {"enforced": False, "bytes": None, "how": "nothing was loaded"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"enforcement": untested}))
    run([str(tmp_path)])
    assert "completed, cached, no cap tested" in markup(tmp_path / "report.html")
