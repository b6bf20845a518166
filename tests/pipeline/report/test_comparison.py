"""What changed between two runs is told in the units of what changed."""

from pathlib import Path

import pytest

from offstage.pipeline.report.comparison import ChangedValue, compare_runs
from offstage.pipeline.report.quantities import MISSING
from offstage.pipeline.report.run_folders import find_one
from tests.pipeline.report.sample_runs import write_run


@pytest.mark.parametrize(
    ("name", "before", "after", "texts"),
    [
        ("perplexity", 23.4375, 12.5, ("23.4375", "12.5000")),
        ("bits_per_byte", 1.25, 0.5, ("1.2500", "0.5000")),
        ("stall_share", 0.25, 0.625, ("25.0 %", "62.5 %")),
        ("expert_hit_rate", 0.5, 0.75, ("50.0 %", "75.0 %")),
        ("draft_acceptance", 0.5, 0.0, ("50.0 %", "0 %")),
        ("draft_acceptance", None, 0.75, (MISSING, "75.0 %")),
        ("host_layers", 1, 12, ("1", "12")),
        ("tokens_per_pass", 1.5, 4.0, ("1.5000", "4.0000")),
        ("scored_tokens_per_second", 7.25, 1e4, ("7.25 tokens/s", "10,000.0 tokens/s")),
        ("stall_seconds", 0.25, 2.0, ("250.0 ms", "2.000 s")),
        ("storage_read_bytes", 5, 2_000_000, ("5 B", "2.00 MB")),
        ("transfer_bytes_per_token.0", 1000, 2_000_000, ("1.00 kB", "2.00 MB")),
        ("streamed_bytes_per_second", 1e6, 2e9, ("1.00 MB/s", "2.00 GB/s")),
    ],
)
def test_a_figure_is_told_in_its_own_unit(
    tmp_path: Path, name: str, before: float | None, after: float, texts: tuple[str, str]
) -> None:
    runs = [
        find_one(write_run(tmp_path / side, metrics={} if value is None else {name: value}))
        for side, value in (("a", before), ("b", after))
    ]
    (changes,) = (section.changes for section in compare_runs(*runs).sections if section.title == "Speed")
    assert [(change.before, change.after) for change in changes if change.key == name] == [texts]


def test_memory_is_told_in_bytes(tmp_path: Path) -> None:
    runs = [find_one(write_run(tmp_path / str(peak), peak=peak)) for peak in (1_000_000, 1_500_000)]
    (changes,) = (section.changes for section in compare_runs(*runs).sections if section.title == "Memory")
    assert ChangedValue("measured cpu", "1.00 MB", "1.50 MB", "1.50") in changes
