"""How fast products read weights, for each shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from offstage.stages.machine import product_probe
from offstage.stages.machine.product_probe import are_steady, measure, memory_bytes, product_seconds, typical


@pytest.fixture(autouse=True)
def _small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_probe, "memory_bytes", lambda: 2**24)


def test_a_product_with_twice_the_rows_takes_longer_and_one_beyond_the_memory_as_long_as_its_rows_say() -> None:
    taken = product_seconds("float32", 0, [(64, 1024), (2048, 1024), (40960, 1024)])
    assert taken[64, 1024] < taken[2048, 1024] < taken[40960, 1024]
    assert taken[40960, 1024] == pytest.approx(10 * product_seconds("float32", 0, [(4096, 1024)])[4096, 1024], rel=0.8)


def test_rates_are_bytes_a_second_by_shape() -> None:
    rates = measure("bfloat16", "8", "512x1024", "1024x512")
    assert rates.keys() == {"512x1024", "1024x512"}
    assert all(10**7 < rate < 10**13 for rate in rates.values())


def test_the_memory_that_is_read_is_larger_than_the_last_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_probe, "_LAST_CACHE", tmp_path / "size")
    least = memory_bytes()
    (tmp_path / "size").write_text("491520K\n")
    assert memory_bytes() == 2 * 480 * 2**20 > least
    (tmp_path / "size").write_text("nonsense")
    assert memory_bytes() == least


def test_what_was_disturbed_is_left_out() -> None:
    assert typical([1.0, 1.0, 1.0, 1.2, 9.0]) == pytest.approx(4.2 / 4)


def test_rounds_that_differ_little_are_enough_from_eight_on() -> None:
    quiet = [1.0, 1.01, 1.02, 1.03, 1.02, 1.01, 1.0]
    assert not are_steady(quiet)
    assert are_steady([*quiet, 9.0]), "one that something else held up says nothing of the others"
    assert not are_steady([*quiet, 1.2, 1.3, 1.2, 1.3])
