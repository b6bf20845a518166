"""The rates of codecs: measured once, kept, and of several the one that they come to together."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from offstage.stages.checkpoints.codec_rates import codec_rates, mean_rate, product_name, sample_of
from offstage.stages.checkpoints.codecs.packed_matrices import as_text, packed_matrix, parts_of
from offstage.stages.checkpoints.dtypes import dtype_name


def test_a_rate_is_measured_once_and_kept_by_the_codecs_name(tmp_path: Path) -> None:
    names = ["zstd", "mxfp4", "q4_k", "int4"]
    rates, _ = codec_rates(tmp_path, "unpacking", names)
    assert list(rates) == names
    assert all(10**7 < rate < 10**12 for rate in rates.values()), "bytes in use a second, of a few cores"
    kept = json.loads(tmp_path.joinpath("decoding.json").read_text())
    assert codec_rates(tmp_path, "unpacking", ["zstd"])[0] == {"zstd": rates["zstd"]}
    assert json.loads(tmp_path.joinpath("decoding.json").read_text()) == kept


def test_a_codec_without_a_sample_has_no_rate(tmp_path: Path) -> None:
    assert codec_rates(tmp_path, "unpacking", ["unheard of"]) == ({}, False)
    assert codec_rates(tmp_path, "unpacking", []) == ({}, False)
    assert not list(tmp_path.glob("decoding.json"))


def test_what_several_codecs_unpack_takes_as_long_as_each_of_them_together() -> None:
    assert mean_rate({"a": 10, "b": 40}, {"a": 100, "b": 400}) == 25
    assert mean_rate({"a": 10}, {"a": 7}) == 10
    assert mean_rate({"a": 10}, {"a": 7, "b": 1}) is None
    assert mean_rate({}, {}) is None


@pytest.mark.parametrize("count", [0, 1])
def test_codecs_that_unpack_nothing_have_no_rate(count: int) -> None:
    assert mean_rate({"a": 10}, {"a": count}) == (10 if count else None)


def test_to_plan_what_is_not_packed_neither_numpy_nor_torch_is_imported() -> None:
    script = "import sys, offstage.stages.plan.stage; assert not {'numpy', 'torch', 'ctypes'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", script], check=True)


def product_of(codec: str, *, times: int = 1) -> str:
    """Return the product with a sample of ``codec``, or such of so many times as many rows."""
    found = sample_of(codec)
    assert found is not None
    tensor, _, data = found
    matrix = packed_matrix(tensor)
    assert matrix is not None
    parts = [(dtype_name(part.dtype), tuple(part.shape)) for part in parts_of(tensor, data)]
    taller = [(kind, (times * rows, *more)) for kind, (rows, *more) in parts]
    return product_name(as_text(replace(matrix, rows=times * matrix.rows)), taller, "bfloat16", tiles=False)


def test_a_product_has_a_rate_and_what_no_memory_is_taken_for_has_none(tmp_path: Path) -> None:
    products = [product_of(codec) for codec in ("q8_0", "fp8", "awq4")]
    large = product_of("q8_0", times=1000)
    rates, _ = codec_rates(tmp_path, "multiplying", [*products, large])
    assert list(rates) == products
    assert all(10**7 < rate < 10**12 for rate in rates.values()), "bytes at rest a second, of a few cores"
    kept = json.loads(tmp_path.joinpath("decoding.json").read_text())
    assert codec_rates(tmp_path, "multiplying", products[1:2])[0] == {products[1]: rates[products[1]]}
    assert json.loads(tmp_path.joinpath("decoding.json").read_text()) == kept
