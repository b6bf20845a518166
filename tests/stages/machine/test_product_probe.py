"""How fast products read weights: measured for each shape in a process of its own, and kept for the user."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from offstage.pipeline.cache.sealed_files import read_sealed, write_sealed
from offstage.stages.machine import product_probe
from offstage.stages.machine.kernels import identity
from offstage.stages.machine.product_probe import (
    FILE_NAME,
    OF_FILES,
    HostWeights,
    measure,
    memory_bytes,
    product_rate,
    product_seconds,
    typical,
)


@pytest.fixture(autouse=True)
def _of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(product_probe, "memory_bytes", lambda: 2**24)


def key(shape: str, weights: HostWeights = OF_FILES) -> str:
    return f"product of {shape} of {weights.name}; {identity()}"


def test_a_product_with_twice_the_rows_takes_longer_and_one_beyond_the_memory_as_long_as_its_rows_say() -> None:
    taken = product_seconds("float32", 0, [(64, 1024), (2048, 1024), (40960, 1024)])
    assert taken[64, 1024] < taken[2048, 1024] < taken[40960, 1024]
    assert taken[40960, 1024] == pytest.approx(10 * product_seconds("float32", 0, [(4096, 1024)])[4096, 1024], rel=0.8)


def test_rates_are_bytes_a_second_by_shape() -> None:
    rates = measure("bfloat16", "8", "512x1024", "1024x512")
    assert rates.keys() == {"512x1024", "1024x512"}
    assert all(10**7 < rate < 10**13 for rate in rates.values())


def test_one_rate_stands_for_all_that_is_read_by_the_seconds_of_each_shape(tmp_path: Path) -> None:
    write_sealed(tmp_path / FILE_NAME, {key("64x64"): 10, key("128x64"): 30})
    assert product_rate(tmp_path, OF_FILES, {(64, 64): 100.0, (128, 64): 300.0}) == 400 / (100 / 10 + 300 / 30)


def test_shapes_that_are_kept_are_not_measured_again_and_all_others_are_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, python = tmp_path / "asked", tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho $* >> {asked}\necho \'{{"64x64": 20, "128x64": 40}}\'\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    read = {(64, 64): 100.0, (128, 64): 100.0}
    for name in ("one", "another"):
        assert product_rate(tmp_path / name, OF_FILES, read) == round(200 / (100 / 20 + 100 / 40))
        assert read_sealed(tmp_path / name / FILE_NAME) == {key("64x64"): 20, key("128x64"): 40}
    assert len(asked.read_text().splitlines()) == 1
    assert product_rate(tmp_path / "one", OF_FILES, {(9, 9): 1.0}) is None, "one that says nothing of it"
    assert product_rate(tmp_path / "one", OF_FILES, {}) is None


def test_the_memory_that_is_read_is_larger_than_the_last_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_probe, "_LAST_CACHE", tmp_path / "size")
    least = memory_bytes()
    (tmp_path / "size").write_text("491520K\n")
    assert memory_bytes() == 2 * 480 * 2**20 > least
    (tmp_path / "size").write_text("nonsense")
    assert memory_bytes() == least


def test_what_was_disturbed_is_left_out() -> None:
    assert typical([1.0, 1.0, 1.0, 1.2, 9.0]) == pytest.approx(4.2 / 4)
