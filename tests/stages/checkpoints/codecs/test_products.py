"""Products with packed weights: the same bits by loops and operators, for any threads and rows, and no less exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from offstage.stages.checkpoints.codecs import loops
from offstage.stages.checkpoints.codecs.ggml_formats import FORMATS
from offstage.stages.checkpoints.codecs.gguf import Arrangement, GgufCodec
from offstage.stages.checkpoints.codecs.loops import FORMATS_OF_LOOPS
from offstage.stages.checkpoints.codecs.products import by_operators, can_multiply, multiply_packed
from offstage.stages.checkpoints.codecs.scaled_codes import ScaledCodes
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import PackedTensor
from offstage.stages.checkpoints.shard_files import ShardFile
from tests.operator_threads import in_threads
from tests.stages.checkpoints.ggufs import dequantized, random_blocks

pytest.importorskip("gguf")

ROWS, COLUMNS = 75, 768
"""No whole number of what the loops take at once."""


@pytest.fixture
def compiled(compiled_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_cache))
    assert loops.loops() is not None


def given_rows(count: int) -> Tensor:
    return torch.randn(count, COLUMNS, generator=torch.Generator().manual_seed(count))


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kind", FORMATS_OF_LOOPS)
def test_bits_hang_neither_on_threads_nor_on_rows_nor_on_what_computes(kind: str) -> None:
    packed, given = torch.from_numpy(random_blocks(kind, ROWS, COLUMNS)), given_rows(7)
    wanted = by_operators(given, packed, kind, ())
    for count in (1, 2, 3):
        with in_threads(count):
            assert same_bits(multiply_packed(given, packed, kind, ()), wanted)
            alone = [multiply_packed(row[None], packed, kind, ()) for row in given]
            assert same_bits(torch.cat(alone), wanted)
            some = multiply_packed(given[2:6].contiguous(), packed, kind, ())
            assert same_bits(some, wanted[2:6])


FP8_GRIDS = {
    "blocks": (75, 768, (16, 128)), "a matrix": (40, 96, (40, 96)), "rows": (33, 1024, (1, 1024)),
    "blocks cut short": (130, 224, (128, 128)), "one row": (1, 32, (1, 32)),
}  # fmt: skip


def fp8_weight(rows: int, columns: int, block: tuple[int, int], *, strange: bool = False) -> tuple[Tensor, Tensor]:
    """Return random codes, all of them numbers unless ``strange``, and their scales."""
    draw = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=draw)
    if not strange:
        codes[(codes & 0x7F) == 0x7F] = 0x7E
    grid = -(-rows // block[0]), -(-columns // block[1])
    return codes, torch.rand(grid, generator=draw) * 0.01 + 1e-3


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("strange", [False, True])
@pytest.mark.parametrize("grid", FP8_GRIDS.values(), ids=FP8_GRIDS)
def test_bits_of_fp8_hang_neither_on_threads_nor_on_rows_nor_on_what_computes(
    grid: tuple[int, int, tuple[int, int]], strange: bool
) -> None:
    (codes, scales), block = fp8_weight(*grid, strange=strange), grid[2]
    given = torch.randn(7, grid[1], generator=torch.Generator().manual_seed(7))
    wanted = by_operators(given, codes, "fp8", block, scales)
    for count in (1, 2, 3):
        with in_threads(count):
            together = multiply_packed(given, codes, "fp8", block, scales)
            alone = torch.cat([multiply_packed(row[None], codes, "fp8", block, scales) for row in given])
        for made in (together, alone):
            assert torch.equal(made.isnan(), wanted.isnan())
            assert same_bits(made.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert bool(wanted.isnan().any()) == bool(((codes & 0x7F) == 0x7F).any())


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_of_fp8_is_no_larger_than_that_of_torchs_product_in_the_dtype(dtype: torch.dtype) -> None:
    block = 128, 128
    codes, scales = fp8_weight(512, COLUMNS, block)
    given = given_rows(64).to(dtype)
    values = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    exact = given.double() @ values.double().T
    ours = multiply_packed(given.float(), codes, "fp8", block, scales).to(dtype)
    theirs = given @ values.to(dtype).T
    error, least = ((each.double() - exact).square().mean().sqrt() for each in (ours, theirs))
    assert 0 < error <= least


@pytest.mark.usefixtures("compiled")
def test_many_rows_of_weights_are_shared_among_threads() -> None:
    packed, given = torch.from_numpy(random_blocks("q8_0", 3000, 256)), given_rows(1)[:, :256].contiguous()
    with in_threads(2):
        assert same_bits(multiply_packed(given, packed, "q8_0", ()), by_operators(given, packed, "q8_0", ()))


@pytest.mark.parametrize("compiles", [True, False])
def test_rows_in_another_order_go_to_their_places(
    compiles: bool, compiled_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiles:
        monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_cache))
    assert (loops.loops() is not None) == compiles
    packed, given = torch.from_numpy(random_blocks("q4_k", 48, COLUMNS)), given_rows(5)
    plain, swapped = multiply_packed(given, packed, "q4_k", ()), multiply_packed(given, packed, "q4_k", (2, 12, 2, 1))
    wanted = plain.view(5, 2, 12, 2).transpose(2, 3).reshape(5, 48)
    assert same_bits(swapped, wanted.contiguous())


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", FORMATS_OF_LOOPS)
def test_the_error_is_no_larger_than_that_of_torchs_product_in_the_dtype(kind: str, dtype: torch.dtype) -> None:
    blocks, given = random_blocks(kind, 512, COLUMNS), given_rows(64).to(dtype)
    values = torch.from_numpy(dequantized(kind, blocks))
    exact = given.double() @ values.double().T
    ours = multiply_packed(given.float(), torch.from_numpy(blocks), kind, ()).to(dtype)
    theirs = given @ values.to(dtype).T
    error, least = ((each.double() - exact).square().mean().sqrt() for each in (ours, theirs))
    assert 0 < error <= least


def test_what_has_no_product_is_told_apart(tmp_path: Path) -> None:
    def tensor(
        kind: str, arrangement: Arrangement, *, parts: int = 1, shape: tuple[int, ...] = (8, 256)
    ) -> PackedTensor:
        width = 256 // FORMATS[kind].elements * FORMATS[kind].bytes
        part = Extent(ShardFile("f", tmp_path / "f", 8 * width, None, ""), 0, "uint8", (8, width))
        return PackedTensor(GgufCodec((kind,) * parts, arrangement), (part,) * parts, "float32", shape)

    plain = Arrangement()
    assert can_multiply(tensor("q6_k", plain))
    assert can_multiply(tensor("q6_k", Arrangement(swapped=(1, 2, 4, 1))))
    assert not can_multiply(tensor("q2_k", plain))
    assert not can_multiply(tensor("q6_k", Arrangement(transposed=True)))
    assert not can_multiply(tensor("q6_k", Arrangement(less=1.0)))
    assert not can_multiply(tensor("q6_k", plain, parts=2))
    assert not can_multiply(tensor("q6_k", plain, shape=(2, 4, 256)))
    assert not can_multiply(tensor("q6_k", plain).parts[0])

    def codes(
        block: tuple[int, int], *, kind: str = "fp8", dtype: str = "float32", shape: tuple[int, ...] = (8, 256)
    ) -> PackedTensor:
        file = ShardFile("f", tmp_path / "f", 2**20, None, "")
        grid = -(-shape[-2] // block[0]), -(-shape[-1] // block[1])
        parts = Extent(file, 0, "float8_e4m3fn", shape), Extent(file, 2**16, dtype, grid)
        return PackedTensor(ScaledCodes(kind, *block), parts, "bfloat16", shape)

    assert can_multiply(codes((4, 128)))
    assert can_multiply(codes((8, 256), dtype="bfloat16"))
    assert not can_multiply(codes((4, 16)))
    assert not can_multiply(codes((4, 128), kind="int8"))
    assert not can_multiply(codes((4, 128), dtype="uint8"))
    assert not can_multiply(codes((4, 128), shape=(2, 8, 256)))
    assert not can_multiply(codes((4, 200), shape=(8, 200)))
