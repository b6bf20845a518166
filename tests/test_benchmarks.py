"""The benchmarks are no part of the tests, since they measure; but they must start."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = sorted(file.stem for file in Path(__file__).with_name("benchmarks").glob("[!_]*.py"))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_can_be_imported(name: str) -> None:
    assert importlib.import_module(f"tests.benchmarks.{name}").__doc__


def test_the_rules_of_eviction_can_be_set_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("tests.benchmarks.eviction").main(["--short"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert [row[0] for row in rows] == ["uniform"] * 8 + ["skewed"] * 8 + ["recorded"] * 8
    for row in rows:
        *rates, optimum = (float(cell.rstrip("%")) for cell in row[3:])
        assert max(rates) <= optimum
