"""Repeats of one generation: what is made of several, and what a record holds of each."""

from typing import Any

import pytest

from offstage.pipeline.measure import MeasureConfig
from offstage.stages.inference.repeats import TimedRepeat, combined_metrics, counted, lacking, percentiles, read_repeat


def repeat(seconds: float = 1.0, **given: Any) -> TimedRepeat:
    metrics = {"decode_seconds_per_token": seconds, "bottleneck": f"bottleneck of {seconds}", "stall_share": None}
    known: dict[str, Any] = {
        "measured": "2026-01-01", "passes_before": 0, "is_whole": True, "metrics": metrics,
        "first_token_seconds": [seconds], "token_seconds": [seconds, 2 * seconds], "processor": {"contended": False},
        "machine": {"storage_bytes_per_second": 10**9}, "peaks": {"cpu": 5},
    }  # fmt: skip
    return TimedRepeat(**{**known, **given})


def test_of_several_repeats_the_record_has_the_median_of_each_figure_and_percentiles_over_all_tokens() -> None:
    of_three = [repeat(3.0), repeat(1.0, processor={"contended": True}), repeat(2.0)]
    metrics = combined_metrics(of_three, seconds="decode_seconds_per_token")
    assert (metrics["decode_seconds_per_token"], metrics["bottleneck"]) == (2.0, "bottleneck of 2.0")
    assert (metrics["repeats"], metrics["contended_repeats"]) == (3, 1)
    assert metrics["stall_share"] is None, "what no repeat knows"
    assert metrics["time_to_first_token_seconds_p50"] == 2.0
    assert metrics["time_between_tokens_seconds_p50"] == 2.5
    assert metrics["time_between_tokens_seconds_p99"] == pytest.approx(5.9)
    assert metrics["storage_bandwidth_bytes_per_second"] == 10**9


def test_one_time_has_no_percentiles() -> None:
    assert percentiles([1.0]) == {}
    assert percentiles([1.0, 3.0])["50"] == 2.0


@pytest.mark.parametrize(
    ("measure", "repeats", "counting", "missing"),
    [
        ({}, [{}], [0], 0),
        ({"repeats": 3}, [{}, {"passes_before": 1}], [0, 1], 1),
        ({"repeats": 2, "warmup": 1}, [{}, {"passes_before": 1}, {"passes_before": 2}], [1, 2], 0),
        ({"warmup": 1}, [{}], [], 1),
        ({"fresh": True}, [{"is_earlier": True}], [], 1),
        ({"fresh": True}, [{"is_earlier": True}, {}], [1], 0),
        ({"repeats": 2}, [{"is_whole": False}], [], 2),
        ({}, [{"is_whole": False}], [0], 0),
        ({}, [{"is_whole": False}, {}], [1], 0),
    ],
)
def test_samples_count_that_are_whole_warm_enough_and_fresh_where_that_is_asked_for(
    measure: dict[str, Any], repeats: list[dict[str, Any]], counting: list[int], missing: int
) -> None:
    timed, wanted = [repeat(**given) for given in repeats], MeasureConfig(**measure)
    fit = counted(timed, wanted)
    assert [place for place, one in enumerate(timed) if any(one is other for other in fit)] == counting
    assert lacking(timed, wanted) == missing


def test_what_is_stored_comes_back_and_of_very_many_times_percentiles_stay() -> None:
    times = [1.0 + (place * 7919 % 5000) / 5000 for place in range(5000)]
    stored = repeat(token_seconds=times).stored()
    back = read_repeat(stored, is_earlier=True)
    assert back.is_earlier
    assert len(back.token_seconds) == 1000
    assert percentiles(back.token_seconds)["90"] == pytest.approx(percentiles(times)["90"], rel=1e-3)
    assert repeat(1.0).as_record(counts=True)["token_seconds"] == [1.0, 2.0]
