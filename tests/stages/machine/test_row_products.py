"""Blocks of rows have the bits of the whole product where the probe says so, whatever the shape."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from offstage.stages.machine.row_products import (
    FILE_NAME,
    LEAST_ROWS,
    exact_dtypes,
    measure as is_exact_by_rows,
    row_ranges,
)
from tests.stages.shard_load.test_load_memory import anonymous_bytes


@pytest.mark.parametrize(("count", "rows"), [(1025, 1024), (1536, 1024), (4099, 1024), (50257, 4096), (128256, 8192)])
def test_blocks_are_all_rows_in_order_and_none_is_short(count: int, rows: int) -> None:
    ranges = row_ranges(count, rows)
    assert [row for block in ranges for row in block] == list(range(count))
    assert all(rows // 2 <= len(block) <= rows for block in ranges)
    assert all(block.start % (rows // 2) == 0 for block in ranges)


def test_what_fits_one_block_is_one() -> None:
    assert row_ranges(1024, 1024) == [range(1024)]


def test_the_answer_is_kept_by_dtype_and_kernels(tmp_path: Path) -> None:
    first = exact_dtypes(tmp_path, ["float32"])
    assert (tmp_path / FILE_NAME).is_file()
    assert exact_dtypes(tmp_path, ["float32"]) == first
    assert first == ({"float32"} if is_exact_by_rows("float32") else set())
    assert exact_dtypes(tmp_path, []) == set()


def test_the_process_that_asks_holds_nothing_of_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of the user"))
    before = anonymous_bytes()
    exact_dtypes(tmp_path, ["bfloat16"])
    assert (tmp_path / FILE_NAME).is_file()
    assert anonymous_bytes() - before < 20_000_000


def test_a_probe_that_fails_gives_no_answer_and_keeps_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of the user"))
    assert exact_dtypes(tmp_path, ["no dtype"]) == set()
    assert not (tmp_path / FILE_NAME).exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("count", "columns"), [(5003, 96), (2051, 640)])
def test_shapes_that_the_probe_never_saw_have_the_same_bits_where_it_says_so(
    dtype: str, count: int, columns: int, tmp_path: Path
) -> None:
    if dtype not in exact_dtypes(tmp_path, [dtype]):
        pytest.skip("this machine's kernels have other bits")
    kind = getattr(torch, dtype)
    torch.manual_seed(1)
    weight, bias = torch.randn(count, columns).to(kind), torch.randn(count).to(kind)
    for left in (torch.randn(4, 6, columns)[:, -1:, :], torch.randn(1, 40, columns), torch.randn(1, 1, columns)):
        whole = functional.linear(left.to(kind), weight, bias)
        for rows in row_ranges(count, LEAST_ROWS):
            within = slice(rows.start, rows.stop)
            assert torch.equal(functional.linear(left.to(kind), weight[within], bias[within]), whole[..., within])


def test_a_kernel_that_sums_up_otherwise_for_fewer_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = functional.linear

    def linear(left: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return real(left, weight, bias) * (1 + 2**-20 * (len(weight) < 2 * LEAST_ROWS))

    monkeypatch.setattr(functional, "linear", linear)
    assert not is_exact_by_rows("float32")
