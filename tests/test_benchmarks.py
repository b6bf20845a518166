"""The benchmarks are no part of the tests, since they measure; but they must start."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = sorted(file.stem for file in Path(__file__).with_name("benchmarks").glob("[!_]*.py"))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_can_be_imported(name: str) -> None:
    assert importlib.import_module(f"tests.benchmarks.{name}").__doc__
