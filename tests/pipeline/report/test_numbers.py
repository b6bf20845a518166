from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from offstage.pipeline.report.differences import config_differences, flatten, spread
from offstage.pipeline.report.quantities import listed, scale_for, tell
from offstage.pipeline.report.run_folders import Job, find
from offstage.pipeline.report.speed import (
    OTHERS,
    pareto,
    speed_series,
)
from offstage.pipeline.run_schema import Run, RunMemory
from tests.pipeline.report.sample_runs import repeat, write_run, write_sweep


def test_a_config_is_flattened_and_one_is_not_the_string_one() -> None:
    tree = {"a": {"b": 1, "c": "1", "d": {}}, "e": None, "f": "null", "g": [1, "x"], "h": True, "i": "plain"}
    assert flatten(tree) == {
        "a.b": "1", "a.c": '"1"', "e": "null", "f": '"null"', "g": '[1, "x"]', "h": "true", "i": "plain",
    }  # fmt: skip


def test_a_spread_has_each_value_with_its_jobs() -> None:
    same, differs = spread({"#0": {"x": "1", "y": "1"}, "#1": {"x": "1"}, "#2": {"x": "1", "y": "1"}})
    assert not same.differs
    assert differs.values == (("1", ("#0", "#2")), ("not given", ("#1",)))


def test_only_what_differs_between_the_configs_is_told(tmp_path: Path) -> None:
    jobs = find([write_sweep(tmp_path)]).jobs
    assert [entry.key for entry in config_differences(jobs)] == ["max_memory.cpu", "device_map"]


def test_a_run_without_a_config_makes_no_difference(tmp_path: Path) -> None:
    write_run(tmp_path / "0")
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "run.json").write_text('{"status": "failed", "config": {}}')
    assert config_differences(find([tmp_path]).jobs) == ()


def job(name: str, *, memory: float, rate: float) -> Job:
    run = Run(
        folder=Path(name), status="completed", overrides=(), config={}, environment={}, stages=(), outputs=(),
        memory=RunMemory(measured={"0": 0, "cpu": memory, "disk": 9**9}), metrics={"decode_tokens_per_second": rate},
    )  # fmt: skip
    return Job(name, run)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_the_front_holds_exactly_the_jobs_that_no_other_beats(pairs: list[tuple[int, int]]) -> None:
    jobs = [job(str(index), memory=memory, rate=rate) for index, (memory, rate) in enumerate(pairs)]
    unbeaten = {
        str(index)
        for index, (memory, rate) in enumerate(pairs)
        if not any(m <= memory and r >= rate and (m, r) != (memory, rate) for m, r in pairs)
    }
    assert {point.job for point in pareto(jobs).best} == unbeaten


def test_a_figure_that_is_not_among_its_samples_is_drawn_all_the_same(tmp_path: Path) -> None:
    write_run(tmp_path / "0", seconds=9.0, repeats=[repeat(0.5), repeat(0.6)])
    write_run(tmp_path / "1", seconds=0.1, repeats=[repeat(0.5), repeat(0.6)])
    (series,) = speed_series(find([tmp_path]).jobs, ())
    assert [(point.least, point.largest) for point in series.measured] == [(0.5, 9.0), (0.1, 0.6)]


def test_past_six_settings_the_others_share_a_series(tmp_path: Path) -> None:
    for number in range(9):
        write_run(tmp_path / str(number), policy=f"policy-{number}")
    jobs = find([tmp_path]).jobs
    series = speed_series(jobs, config_differences(jobs))
    assert len(series) == 7
    assert [len(entry.measured) for entry in series if entry.name == OTHERS] == [3]


@pytest.mark.parametrize(
    ("values", "kind", "texts"),
    [
        ([0], "bytes", ["0 B"]),
        ([0], "seconds", ["0 s"]),
        ([950, 20], "bytes", ["950 B", "20 B"]),
        ([1_240_000_000, 1_000_000, None], "bytes", ["1.24 GB", "<0.01 GB", "\N{EN DASH}"]),
        ([0.5, 0.0123], "seconds", ["500.0 ms", "12.3 ms"]),
        ([2.5, 12.0], "seconds", ["2.50 s", "12.00 s"]),
        ([3e-6], "seconds", ["3.00 µs"]),
        ([12_345.6], "rate", ["12,345.6"]),
    ],
)
def test_numbers_share_the_unit_of_the_largest(values: list[float | None], kind: str, texts: list[str]) -> None:
    scale = scale_for(values, kind)  # type: ignore[arg-type]
    assert [scale.text(value) for value in values] == texts


def test_a_number_alone_and_a_long_list_read_well() -> None:
    assert tell(3_410_000, "bytes") == "3.41 MB"
    assert listed(["a", "b"]) == "a, b"
    assert listed([str(number) for number in range(1000)], most=4) == "0, 1, … 1,000 in all"
