"""What a job does with its record: the cap that its plan comes to."""

from __future__ import annotations

from pathlib import Path

import pytest

from offstage.pipeline.job import cap_bytes
from offstage.pipeline.memory_cgroups import KERNEL_BYTES
from offstage.pipeline.record import RunRecord
from offstage.pipeline.stage import Report


@pytest.mark.parametrize(
    ("max_memory", "allowed"),
    [({}, 296), ({"0": "1GB"}, 296), ({"cpu": "22500"}, 22_500), ({"cpu": "100"}, 296)],
    ids=["worked out", "of an accelerator alone", "given", "given, and less than the process takes"],
)
def test_the_cap_is_the_prediction_or_the_budget_that_was_given(
    max_memory: dict[str, str], allowed: int, tmp_path: Path
) -> None:
    record = RunRecord.start(tmp_path, overrides=[], config={"max_memory": max_memory}, environment={})
    assert cap_bytes(record) is None, "there is no plan yet"
    budget = int(max_memory.get("cpu", 0)) if max_memory else 22_500
    record.merge(Report(memory={"budget": {"cpu": budget}, "predicted": {"cpu": 296}}))
    assert cap_bytes(record) == allowed + KERNEL_BYTES
