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
