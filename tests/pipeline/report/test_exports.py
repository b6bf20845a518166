"""The table for other tools: what a record says never becomes a formula there."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from offstage.pipeline.report.exports import as_csv, as_latex
from offstage.pipeline.report.run_folders import find
from offstage.pipeline.report.summary import summarise
from tests.pipeline.report.sample_runs import write_run

FORMULAS = (
    '=HYPERLINK("http://x","y")', "+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\t=1", "\n=1", " =1+1", "\uff1d1", "--1",
)  # fmt: skip


def rows_of(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(as_csv(summarise(find([folder]))))))


@pytest.mark.parametrize("text", FORMULAS)
def test_a_text_never_becomes_a_formula(text: str, tmp_path: Path) -> None:
    write_run(tmp_path / "0", policy=text, metrics={"told": text})
    write_run(tmp_path / "1", policy="optimal", metrics={"told": "@", text: 1})
    first, second = rows_of(tmp_path)
    assert first["config.device_map"] == first["metrics.told"] == f"'{text}"
    assert second["metrics.told"] == "'@"
    assert all(
        cell.strip()[:1] not in tuple("=+-@\uff1d") for cell in (*first, *first.values(), *second.values()) if cell
    )


def test_numbers_stay_numbers(tmp_path: Path) -> None:
    write_run(tmp_path / "0", seconds=-1.5e-7, generate={"seed": -1})
    write_run(tmp_path / "1", seconds=0.25, generate={"seed": 2})
    first, second = rows_of(tmp_path)
    assert (first["config.generate.seed"], first["metrics.decode_seconds_per_token"]) == ("-1", "-1.5e-07")
    assert (second["config.generate.seed"], second["metrics.decode_seconds_per_token"]) == ("2", "0.25")


def test_the_table_for_a_paper_has_the_headings_units_and_cells_of_the_page(tmp_path: Path) -> None:
    write_run(tmp_path / "0", policy="a_b & 50%", seconds=0.25)
    write_run(tmp_path / "1", seconds=0.5, peak=2 * 10**9)
    lines = as_latex(summarise(find([tmp_path]))).splitlines()
    assert lines[0] == r"\begin{tabular}{lllrrrrr}"
    assert lines[2] == (
        r"job & status & device\_map & budget cpu, GB & time a token, ms & speed, tokens/s & streamed a token, GB & "
        r"peak cpu, GB \\"
    )
    assert lines[4] == r"\#0 & completed & a\_b \& 50\% & 1.00 & 250.0 & 4.00 & 2.00 & 1.40 \\"
