"""Metrics are declared once: what a table of them says of a name, and of what nobody declared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.installed_stages import installed_metrics, installed_stages, metric_table, stage_class
from offstage.pipeline.metrics import Metric, MetricTable
from offstage.pipeline.run_schema import Run

SPEED = Metric("speed", "echoes/s", "echoes a second", leads=True)
GUESS = Metric("guess", "echoes/s", "echoes a second", kind="predicted", of="speed", optional=True)
LINK = Metric("loud_bytes", "bytes", "loud", per_device=True)
TABLE = MetricTable.of([GUESS, SPEED, LINK])


@pytest.mark.parametrize(
    ("name", "value", "unit"),
    [
        ("speed", 1.5, "echoes/s"),
        ("loud_bytes.0", 5, "bytes"),
        ("speed.0", 5, "count"),
        ("memory.measured.cpu", 5, "bytes"),
        ("a_share_in_seconds", 5, "count"),
        ("a_share_in_seconds", 5.5, "number"),
    ],
)
def test_a_unit_is_what_was_declared_and_no_part_of_a_name(name: str, value: float, unit: str) -> None:
    assert TABLE.unit(name, value) == unit


def test_a_prediction_stands_beside_what_it_is_of_and_what_is_of_each_device_apart() -> None:
    assert list(TABLE.rows()) == [(SPEED, GUESS)]
    assert TABLE.links() == (LINK,)
    assert (SPEED.heading, GUESS.heading) == ("echoes a second", "echoes a second, predicted")
    assert TABLE.nulls() == {"speed": None}


def test_a_table_comes_back_from_a_record_but_for_what_cannot_be_read() -> None:
    stored = TABLE.stored()
    assert stored["guess"] == {
        "unit": "echoes/s", "title": "echoes a second", "kind": "predicted", "of": "speed", "optional": True,
    }  # fmt: skip
    newer = {"a": {"unit": "bytes", "colour": "red"}, "b": {"unit": "fathoms"}, "c": 3, "d": {"title": "no unit"}}
    assert MetricTable.read({**stored, **newer}) == TABLE
    assert MetricTable.read(["speed"]) == MetricTable({})


@pytest.mark.parametrize("unit", ["fathoms", "/s", "", "byte", "2/s"])
def test_a_unit_that_is_none_is_refused_with_those_that_are(unit: str) -> None:
    with pytest.raises(ValueError, match=r"is no unit of a metric; give one of seconds, bytes, share"):
        Metric("x", unit)


def test_two_stages_that_differ_on_one_metric_are_told_so() -> None:
    with pytest.raises(ConfigError, match=r"two of them declare the metric 'speed'.*give one of them another name"):
        MetricTable.of([SPEED, Metric("speed", "seconds")])


def test_a_record_from_before_there_were_tables_is_read_by_the_installed_stages() -> None:
    older = Run(status="completed", overrides=(), config={}, environment={}, stages=(), metrics={}, outputs=())
    assert metric_table(older) is installed_metrics()
    assert metric_table(replace(older, metric_table=TABLE.stored())) == TABLE


def test_the_stages_of_this_project_agree_on_each_metric_that_they_share() -> None:
    declared = [metric for name in installed_stages() for metric in getattr(stage_class(name), "metrics", ())]
    assert len(MetricTable.of(declared).metrics) < len(declared)
    of = {metric.of for metric in declared if metric.of}
    assert of <= {metric.name for metric in declared}
