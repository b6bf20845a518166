"""The closing table of a sweep says where each figure comes from."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from pipeline.hydra_task import Outcome
from pipeline.record import RunRecord
from pipeline.sweep_results import show_sweep
from tests.pipeline.report.sample_runs import sample, write_failure, write_run


def test_figures_that_were_measured_earlier_or_while_others_computed_are_said_to_be_so(tmp_path: Path) -> None:
    write_run(tmp_path / "0", samples=[sample(0.5), sample(0.6, busy=True)])
    write_run(tmp_path / "1", samples=[sample(0.5, earlier=True)], cached=True)
    write_failure(tmp_path / "2")
    RunRecord.load(tmp_path / "1").note_enforcement(bytes_allowed=None, how="nothing was loaded")
    console = Console(file=io.StringIO(), width=200)
    show_sweep(console, tmp_path, [Outcome(number, [f"seed={number}"], number // 2) for number in range(3)])
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "figures" in lines[0]
    assert "measured, median of 2, 1 busy" in lines[1]
    assert "measured earlier" in lines[2]
    assert "no memory cap was tested: nothing was loaded" in lines[2]
    assert "measured" not in lines[3]
