"""Products with packed weights: the same bits by loops and operators, for any threads and rows, and no less exact."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.codecs import loops
from offstage.stages.checkpoints.codecs.compressed_tensors import fold_compressed
from offstage.stages.checkpoints.codecs.ggml_formats import FORMATS
from offstage.stages.checkpoints.codecs.gguf import Arrangement, GgufCodec
from offstage.stages.checkpoints.codecs.loops import FORMATS_OF_LOOPS
from offstage.stages.checkpoints.codecs.ordered_linear import linear_in_order
from offstage.stages.checkpoints.codecs.packed_matrices import (
    GgmlMatrix,
    PackedMatrix,
    PlainMatrix,
    ScaledMatrix,
    as_text,
    packed_matrix,
)
from offstage.stages.checkpoints.codecs.products import by_operators, multiply_packed
from offstage.stages.checkpoints.codecs.scaled_codes import MXFP4, ScaledCodes, table_codes
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import PackedTensor
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine.kernels import has_tiles
from tests.long_form import in_part
from tests.operator_threads import in_threads
from tests.stages.checkpoints.codecs import test_bitsandbytes, test_compressed_tensors, test_grouped
from tests.stages.checkpoints.ggufs import dequantized, random_blocks

pytest.importorskip("gguf")

COLUMNS = 768
OPERATOR = "offstage::multiply_packed"
Weight = tuple[PackedMatrix, list[Tensor]]
Make = Callable[[Path, int, int], Weight]
"""Makes a weight of so many rows and columns at random, in a folder: what it is, and what it rests in."""


def of_ggml(kind: str) -> Make:
    def make(folder: Path, rows: int, columns: int) -> Weight:
        return GgmlMatrix(rows, columns, kind), [torch.from_numpy(random_blocks(kind, rows, columns))]

    return make


def of_file(folder: Path, source: PackedTensor) -> Weight:
    """Return the weight that the parts of ``source`` are of the file in ``folder``."""
    stored = load_file(folder / "model.safetensors")
    by_place = {(part.begin, part.bytes): name for name, part in open_checkpoint(folder).entries.items()}
    parts = [stored[by_place[part.begin, part.bytes]] for part in source.parts]
    matrix = packed_matrix(source)
    assert matrix is not None
    return matrix, [part.view(torch.uint8) if part.itemsize == 1 else part for part in parts]


def compressed(scheme: str, scales: torch.dtype = torch.bfloat16) -> Make:
    def make(folder: Path, rows: int, columns: int) -> Weight:
        form, weights = test_compressed_tensors.SCHEMES[scheme]
        torch.manual_seed(rows)
        parts = test_compressed_tensors.packed(form, weights, scales, (rows, columns))
        save_file({f"m.{name}": part for name, part in parts.items()}, folder / "model.safetensors")
        entries = open_checkpoint(folder).entries
        (source,) = fold_compressed(entries, test_compressed_tensors.declared(form, weights)).values()
        assert isinstance(source, PackedTensor)
        return of_file(folder, source)

    return make


def bitsandbytes(*, nested: bool) -> Make:
    def make(folder: Path, rows: int, columns: int) -> Weight:
        torch.manual_seed(rows)
        tensors = test_bitsandbytes.packed((rows, columns), nested=nested)
        (source,) = test_bitsandbytes.folded(folder, tensors).values()
        assert isinstance(source, PackedTensor)
        return of_file(folder, source)

    return make


def grouped(kind: str, scales: torch.dtype = torch.float16) -> Make:
    def make(folder: Path, rows: int, columns: int) -> Weight:
        quantization = test_grouped.KINDS[kind]
        parts, _ = test_grouped.packed(quantization, (rows, columns), dtype=scales)
        return of_file(folder, test_grouped.folded(folder, parts, quantization))

    return make


def codes(
    code: str, block: tuple[int, int], scales: str = "float32", *, strange: bool = False, extreme: bool = False
) -> Make:
    """Random codes of one byte, all of them numbers unless ``strange``, and scales of an FP8 checkpoint.

    ``extreme`` ones are near the largest of all numbers, of codes so small that no product is beyond these.
    """

    def make(folder: Path, rows: int, columns: int) -> Weight:
        draw = torch.Generator().manual_seed(rows)
        codes = torch.randint(0, 256, (rows, columns // (2 if code == "fp4" else 1)), dtype=torch.uint8, generator=draw)
        if not strange and code == "fp8":
            codes[(codes & 0x7F) == 0x7F] = 0x7E
        codes &= 0x87 if extreme else 0xFF
        grid = -(-rows // block[0]), -(-columns // block[1])
        if scales in ("uint8", "float8_e8m0fnu"):
            factors = torch.randint(118, 122, grid, dtype=torch.uint8, generator=draw)
        else:
            factors = (torch.rand(grid, generator=draw) * 0.01 + 1e-3).to(getattr(torch, scales))
            factors *= 2.0**100 if extreme else 1
            factors *= 2.0**34 if extreme else 1
        return ScaledMatrix(rows, columns, code, *block, scales), [codes, factors]

    return make


def as_in_use(_folder: Path, rows: int, columns: int) -> Weight:
    return PlainMatrix(rows, columns), [given_rows(rows, columns)]


WEIGHTS: Mapping[str, tuple[Make, int, int]] = {
    "float32": (as_in_use, 75, COLUMNS),
    **{kind: (of_ggml(kind), 75, COLUMNS) for kind in FORMATS_OF_LOOPS},
    "q8_0 in long rows": (of_ggml("q8_0"), 50, 6304),
    "fp8 in blocks": (codes("fp8", (16, 128)), 75, COLUMNS),
    "fp8, one scale": (codes("fp8", (40, 96), "bfloat16"), 40, 96),
    "fp8 by rows": (codes("fp8", (1, 1024), "float16"), 33, 1024),
    "fp8 in blocks cut short": (codes("fp8", (128, 128)), 130, 224),
    "fp8, one row": (codes("fp8", (1, 32)), 1, 32),
    "fp8 in runs of 32": (codes("fp8", (1, 32), "float8_e8m0fnu"), 9, 96),
    "fp8, extreme scales": (codes("fp8", (1, 32), extreme=True), 12, 96),
    "fp8, some no numbers": (codes("fp8", (16, 128), strange=True), 75, COLUMNS),
    "fp4 of experts": (codes("fp4", (1, 32), "uint8"), 75, COLUMNS),
    **{f"compressed-tensors, {name}": (compressed(name), 64, 96) for name in test_compressed_tensors.SCHEMES},
    "INT4 by groups, float32": (compressed("INT4 by groups", torch.float32), 75, COLUMNS),
    "INT8 by channels, float16": (compressed("INT8 by channels", torch.float16), 75, COLUMNS),
    "nf4": (bitsandbytes(nested=False), 75, COLUMNS),
    "nf4, scales packed too": (bitsandbytes(nested=True), 75, COLUMNS),
    **{name: (grouped(name), 96, 256) for name in test_grouped.KINDS},
    "GPTQ in long rows": (grouped("GPTQ, reordered"), 96, 1280),
    "GPTQ, bfloat16": (grouped("GPTQ, reordered", torch.bfloat16), 160, 192),
    "AWQ, float32": (grouped("AWQ", torch.float32), 72, 192),
}
"""Weights of few rows, by kind: no whole number of what the loops take at once, where that can be."""


@pytest.fixture
def compiled(compiled_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_cache))
    assert loops.loops() is not None


def given_rows(count: int, columns: int = COLUMNS, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(dtype)


def way_of_bfloat16(*, tiles: bool = False) -> loops.Way:
    """Return in which way the loops multiply rows of bfloat16 here, in ``tiles`` if they are to."""
    known = loops.loops()
    return "tiles" if tiles else "floats" if known is None else known.way_of_bfloat16


def wanted_of(
    given: Tensor, parts: list[Tensor], matrix_text: str, bias: Tensor | None = None, *, tiles: bool = False
) -> Tensor:
    """Return the products as torch's operators compute them: of bfloat16 in pairs where processors do, or in tiles."""
    way: loops.Way = way_of_bfloat16(tiles=tiles) if given.dtype == torch.bfloat16 else "floats"
    return by_operators(given, parts, matrix_text, bias, way=way)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether all numbers are the same, bit for bit, and what is none is none in both."""
    if not torch.equal(one.isnan(), other.isnan()):
        return False
    kind = torch.int32 if one.dtype == torch.float32 else torch.int16
    return torch.equal(one.nan_to_num(7.0).view(kind), other.nan_to_num(7.0).view(kind))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("dtype", "tiles"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["float32", "bfloat16", "tiles"],
)
@pytest.mark.parametrize("name", in_part(WEIGHTS))
def test_bits_hang_neither_on_threads_nor_on_rows_nor_on_what_computes(
    name: str, dtype: torch.dtype, tiles: bool, tmp_path: Path
) -> None:
    if tiles and not has_tiles():
        pytest.skip("the processor has no tiles of bfloat16 (AMX)")
    make, rows, columns = WEIGHTS[name]
    matrix, parts = make(tmp_path, rows, columns)
    given, matrix_text = given_rows(39, columns, dtype), as_text(matrix)
    bias = given_rows(1, matrix.rows, dtype)[0]
    wanted = wanted_of(given, parts, matrix_text, bias, tiles=tiles)
    assert bool(wanted.isnan().any()) == ("no numbers" in name)
    for count in (1, 2, 3):
        with in_threads(count):
            for some in (1, 2, 3, 4, 7, 13, 17, 32, 39):
                assert same_bits(multiply_packed(given[:some], parts, matrix_text, bias, tiles=tiles), wanted[:some])
            assert same_bits(multiply_packed(given[2:6], parts, matrix_text, bias, tiles=tiles), wanted[2:6])


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", ["q4_k", "fp8 in blocks", "GPTQ of 4 bits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_given_may_be_rounded_for_the_product(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make, rows, columns = WEIGHTS[name]
    matrix, parts = make(tmp_path, rows, columns)
    given, matrix_text = given_rows(5, columns, dtype), as_text(matrix)
    product = multiply_packed(given, parts, matrix_text, compute=torch.bfloat16)
    wanted = by_operators(given.bfloat16().float(), parts, matrix_text, way=way_of_bfloat16()).to(dtype)
    assert same_bits(product, wanted)
    assert not same_bits(product, multiply_packed(given, parts, matrix_text))


@pytest.mark.usefixtures("compiled")
def test_a_weight_that_is_not_packed_is_multiplied_in_the_same_order() -> None:
    given, weight, bias = given_rows(7, 96), given_rows(40, 96), given_rows(1, 40)[0]
    wanted = by_operators(given, [weight], as_text(PlainMatrix(40, 96)), bias)
    for count in (1, 2):
        with in_threads(count):
            assert same_bits(linear_in_order(given.view(7, 1, 96), weight, bias).view(7, 40), wanted)
            assert same_bits(linear_in_order(given[:1], weight[8:24], bias[8:24]), wanted[:1, 8:24])


@pytest.mark.parametrize("why", ["no loops", "gradients", "another dtype", "autocast"])
def test_else_it_is_multiplied_as_ever(why: str, request: pytest.FixtureRequest) -> None:
    if why != "no loops":
        request.getfixturevalue("compiled")
    kind = torch.bfloat16 if why == "another dtype" else torch.float32
    given, weight = given_rows(7, 96, kind), given_rows(40, 96, kind).requires_grad_(why == "gradients")
    with torch.autocast("cpu", enabled=why == "autocast"):
        found, wanted = linear_in_order(given, weight), torch.nn.functional.linear(given, weight)
    assert torch.equal(found, wanted)
    assert found.requires_grad == (why == "gradients")
    assert found.dtype == (torch.bfloat16 if why == "autocast" else kind)


def test_tiles_are_those_of_operators_where_there_are_no_loops(tmp_path: Path) -> None:
    make, rows, columns = WEIGHTS["q8_0"]
    matrix, parts = make(tmp_path, rows, columns)
    given, matrix_text = given_rows(5, columns, torch.bfloat16), as_text(matrix)
    assert loops.loops() is None
    in_tiles = multiply_packed(given, parts, matrix_text, tiles=True)
    assert same_bits(in_tiles, by_operators(given, parts, matrix_text, way="tiles"))
    assert same_bits(multiply_packed(given[3:], parts, matrix_text, tiles=True), in_tiles[3:])


@pytest.mark.usefixtures("compiled")
def test_what_rests_at_an_address_may_change(tmp_path: Path) -> None:
    make, rows, columns = WEIGHTS["q8_0"]
    matrix, (packed,) = make(tmp_path, rows, columns)
    given, matrix_text = given_rows(5, columns), as_text(matrix)
    before = multiply_packed(given, [packed], matrix_text)
    packed.copy_(packed.flip(0))
    after = multiply_packed(given, [packed], matrix_text)
    assert same_bits(after, before.flip(1))
    assert not same_bits(after, before)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of compilers for x86")
@pytest.mark.parametrize("lacking", in_part(["-mno-avx512f -mno-avx2 -mno-f16c -mno-fma", "-mno-avx512f"]))
def test_bits_are_those_of_processors_with_fewer_instructions(
    lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", f"cc {lacking}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loops.build()
    if loops.loops() is None:
        pytest.skip("no compiler")
    for number, (make, rows, columns) in enumerate(WEIGHTS.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        matrix, parts = make(folder, rows, columns)
        given, matrix_text = given_rows(6, columns), as_text(matrix)
        wanted = by_operators(given, parts, matrix_text)
        assert same_bits(multiply_packed(given, parts, matrix_text), wanted)
        assert same_bits(multiply_packed(given[:1], parts, matrix_text), wanted[:1])


def plain(name: str, folder: Path) -> tuple[Tensor, str, list[Tensor]]:
    """Return a weight of more rows as float32 values, by the format's own arithmetic, and as it rests."""
    make, _, _ = WEIGHTS[name]
    matrix, parts = make(folder, 512, COLUMNS)
    if isinstance(matrix, GgmlMatrix):
        return torch.from_numpy(dequantized(matrix.kind, parts[0].numpy())), as_text(matrix), parts
    return matrix.values(parts, 0, 512), as_text(matrix), parts


ONE_OF_EACH = (
    *FORMATS_OF_LOOPS, "fp8 in blocks", "fp4 of experts", "compressed-tensors, INT8 by channels",
    "compressed-tensors, INT4 by groups", "compressed-tensors, NVFP4", "nf4", "nf4, scales packed too",
    "GPTQ of 2 bits", "GPTQ of 3 bits", "GPTQ of 4 bits", "GPTQ of 8 bits", "GPTQ, reordered", "AWQ",
)  # fmt: skip


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_error_is_no_larger_than_that_of_torchs_product_in_the_dtype(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    (values, matrix_text, parts), given = plain(name, tmp_path), given_rows(64).to(dtype)
    exact = given.double() @ values.double().T
    ours = multiply_packed(given, parts, matrix_text)
    theirs = given @ values.to(dtype).T
    error, least = ((each.double() - exact).square().mean().sqrt() for each in (ours, theirs))
    assert 0 < error <= 1.001 * least  # both are that of rounding sums once where the dtype has all weights


@pytest.mark.parametrize("kind", in_part([kind for kind in test_grouped.KINDS if "128" not in kind]))
def test_integers_in_groups_are_the_formats_arithmetic(kind: str, tmp_path: Path) -> None:
    parts, weight = test_grouped.packed(test_grouped.KINDS[kind], (96, 256), dtype=torch.float32)
    matrix, at_rest = of_file(tmp_path, test_grouped.folded(tmp_path, parts, test_grouped.KINDS[kind]))
    assert torch.equal(matrix.values(at_rest, 0, 96), weight)
    assert torch.equal(matrix.values(at_rest, 33, 70), weight[33:70])


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", ["q8_0", "GPTQ of 4 bits", "nf4"])
def test_many_rows_of_weights_are_shared_among_threads(name: str, tmp_path: Path) -> None:
    matrix, parts = WEIGHTS[name][0](tmp_path, 3000 if name != "GPTQ of 4 bits" else 3008, 256)
    given, matrix_text = given_rows(1, 256), as_text(matrix)
    with in_threads(2):
        assert same_bits(multiply_packed(given, parts, matrix_text), by_operators(given, parts, matrix_text))


@pytest.mark.parametrize("compiles", [True, False])
def test_rows_in_another_order_go_to_their_places(
    compiles: bool, compiled_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiles:
        monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_cache))
    assert (loops.loops() is not None) == compiles
    matrix, parts = GgmlMatrix(48, COLUMNS, "q4_k"), [torch.from_numpy(random_blocks("q4_k", 48, COLUMNS))]
    given, other = given_rows(5), replace(matrix, swapped=(2, 12, 2, 1))
    in_order, swapped = (multiply_packed(given, parts, as_text(each)) for each in (matrix, other))
    wanted = in_order.view(5, 2, 12, 2).transpose(2, 3).reshape(5, 48)
    assert same_bits(swapped, wanted.contiguous())


def test_what_has_no_product_is_told_apart(tmp_path: Path) -> None:
    file = ShardFile("f", tmp_path / "f", 2**20, None, "")

    def tensor(
        kind: str, arrangement: Arrangement, *, parts: int = 1, shape: tuple[int, ...] = (8, 256)
    ) -> PackedTensor:
        width = 256 // FORMATS[kind].elements * FORMATS[kind].bytes
        part = Extent(file, 0, "uint8", (8, width))
        return PackedTensor(GgufCodec((kind,) * parts, arrangement), (part,) * parts, "float32", shape)

    in_order = Arrangement()
    assert packed_matrix(tensor("q6_k", in_order)) == GgmlMatrix(8, 256, "q6_k")
    assert packed_matrix(tensor("q6_k", Arrangement(swapped=(1, 2, 4, 1)))) is not None
    assert packed_matrix(tensor("q2_k", in_order)) is None
    assert packed_matrix(tensor("q6_k", Arrangement(transposed=True))) is None
    assert packed_matrix(tensor("q6_k", Arrangement(less=1.0))) is None
    assert packed_matrix(tensor("q6_k", in_order, parts=2)) is None
    assert packed_matrix(tensor("q6_k", in_order, shape=(2, 4, 256))) is None
    assert packed_matrix(tensor("q6_k", in_order).parts[0]) is None

    def scaled(
        block: tuple[int, int], *, kind: str = "fp8", dtype: str = "float32", shape: tuple[int, ...] = (8, 256)
    ) -> PackedTensor:
        grid = -(-shape[-2] // block[0]), -(-shape[-1] // block[1])
        parts = Extent(file, 0, "float8_e4m3fn", shape), Extent(file, 2**16, dtype, grid)
        return PackedTensor(ScaledCodes(kind, *block), parts, "bfloat16", shape)

    assert packed_matrix(scaled((4, 128))) == ScaledMatrix(8, 256, "fp8", 4, 128, "float32")
    assert packed_matrix(scaled((8, 256), dtype="uint8")) is not None
    assert packed_matrix(scaled((4, 16), kind="fp4")) is not None
    assert packed_matrix(scaled((4, 48))) is None
    assert packed_matrix(scaled((4, 128), kind="int8")) is not None
    assert packed_matrix(scaled((4, 200), shape=(8, 200))) is None
    stack = PackedTensor(
        MXFP4, (Extent(file, 0, "uint8", (2, 8, 3, 16)), Extent(file, 0, "uint8", (2, 8, 3))), "bfloat16", (2, 96, 8)
    )
    assert packed_matrix(stack) == ScaledMatrix(8, 96, "fp4", 1, 32, "uint8")
    file_of_codes = Extent(file, 0, "uint8", (96, 1)), Extent(file, 0, "float32", (3,))
    over = PackedTensor(table_codes((0.5,) * 16, 64, None, ("bfloat16",)), file_of_codes, "bfloat16", (2, 96))
    assert packed_matrix(over) is None, "runs of values go over from row to row"
    assert packed_matrix(replace(over, shape=(3, 64))) is not None


def test_loops_are_given_no_address_of_another_device_than_the_host() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    served = [key for key in ("CPU", "Meta", "CUDA", "XPU", "MPS", "PrivateUse1") if has_kernel(OPERATOR, key)]
    assert served == ["CPU", "Meta"], "torch itself refuses operands that lie elsewhere, some of them or all"
    assert not any(has_kernel(OPERATOR, f"Composite{how}Autograd") for how in ("Implicit", "Explicit"))
