"""What floats are quantised to: the bytes that others' code makes, within a format's bounds, as codecs read them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offstage.stages.checkpoints.codecs import ggml_packing, loops
from offstage.stages.checkpoints.codecs.ggml_blocks import UNPACK
from offstage.stages.checkpoints.codecs.ggml_formats import FORMATS
from offstage.stages.checkpoints.codecs.ggml_packing import PACK
from offstage.stages.checkpoints.codecs.quantisers import QUANTISERS
from offstage.stages.checkpoints.extents import Extent, TensorHeader
from offstage.stages.checkpoints.packed import PackedTensor, memory_file
from offstage.stages.checkpoints.quantization import QUANTISES
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.checkpoints.shard_files import ShardFile
from tests.stages.checkpoints.ggufs import dequantized

SHAPES = ((96, 64), (128, 128), (200, 416), (3, 160, 96))
"""The last blocks of FP8 are whole, cut short, or begin anew in each matrix."""


def values(shape: tuple[int, ...], *, seed: int = 0) -> torch.Tensor:
    """Return values over thirteen orders of magnitude, with rows of zeros, equal values and an outlier."""
    chance = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=chance) * 10.0 ** torch.randint(-9, 4, shape[-2:], generator=chance)
    made.view(-1, shape[-1])[:2] = torch.tensor([0.0, 0.5])[:, None]
    made.view(-1)[-1] = 3e4
    return made


def requantised(kind: str, made: torch.Tensor) -> torch.Tensor:
    """Return what ``made`` (…, rows, columns) comes to once it was quantised, read by the format's codec."""
    quantiser, header = QUANTISERS[kind], TensorHeader("float32", tuple(made.shape))
    assert quantiser.fits(header)
    parts = [list(quantiser.quantise(matrix.clone())) for matrix in made.view(-1, *made.shape[-2:])]
    together = [torch.cat(part) for part in zip(*parts, strict=True)]
    extents = {}
    for (name, part), data in zip(quantiser.parts("w", header).items(), together, strict=True):
        extent = Extent(ShardFile("w", Path("w"), len(data), None, ""), 0, part.dtype, part.shape)
        assert extent.bytes == len(data)
        extents[name] = Extent(memory_file(extent, data.numpy()), 0, part.dtype, part.shape)
    packed = quantiser.packed("w", header, extents)
    assert isinstance(packed, PackedTensor)
    assert packed.shape == made.shape
    return read_extent(PackedTensor(packed.codec, packed.parts, "float32", packed.shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_q8_0_has_the_bytes_of_the_gguf_package(shape: tuple[int, ...]) -> None:
    gguf = pytest.importorskip("gguf")
    made = values(shape)
    theirs = gguf.quants.quantize(made.numpy(), gguf.GGMLQuantizationType.Q8_0)
    (ours,) = QUANTISERS["q8_0"].quantise(made.clone().view(-1, shape[-1]))
    assert ours.numpy().tobytes() == theirs.tobytes()


@pytest.mark.parametrize("shape", SHAPES)
def test_q8_0_is_off_by_half_a_step_and_what_float16_loses_of_it(shape: tuple[int, ...]) -> None:
    made = values(shape)
    values_again = requantised("q8_0", made).view(-1, 32)
    blocks = made.view(-1, 32).double()
    step = blocks.abs().amax(1, keepdim=True) / 127
    lost = torch.maximum(step * 2.0**-11, torch.full_like(step, 2.0**-25))
    assert bool(((values_again.double() - blocks).abs() <= step * (0.5 + 2**-20) + 127 * lost).all())


NORMAL = {"q6_k": 0.0175, "q5_k": 0.036, "q4_k": 0.0715, "q5_1": 0.034, "q4_1": 0.0705}
"""How far off normally distributed values are, root mean square, of theirs. llama.cpp's own are off by 0.0178, 0.0362,
0.0714, 0.0379 and 0.0782 (``ggml_quantize_chunk``).
"""


@pytest.mark.parametrize("stored", NORMAL)
def test_others_of_llama_cpp_are_off_by_about_as_much_as_its_own_or_less(stored: str) -> None:
    kind, columns = (stored, 512) if stored.endswith("k") else (stored.replace("_1", "_k"), 416)
    made = torch.randn(256, columns, generator=torch.Generator().manual_seed(2)) * 0.02
    lost = (requantised(kind, made) - made).square().mean().sqrt() / made.square().mean().sqrt()
    assert 0.9 * NORMAL[stored] < lost < NORMAL[stored]


def blocks_to_fit(seed: int) -> torch.Tensor:
    """Return rows of 256 values, some of them hard: zeros of either sign, few values, one sign, all magnitudes."""
    chance = torch.Generator().manual_seed(seed)
    made = torch.randn(int(torch.randint(1, 40, (1,), generator=chance)), 256, generator=chance)
    kinds: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda values: values,
        lambda values: values * 10.0 ** torch.randint(-9, 4, values.shape, generator=chance),
        lambda values: values * (torch.rand(values.shape, generator=chance) < 0.2),
        lambda values: values.sign() / 2,
        lambda values: values.abs() + 1,
        lambda values: -values.abs() * 10.0 ** torch.randint(-7, 4, (len(values), 1), generator=chance),
        lambda values: (3 * values).round(),
        lambda values: torch.where(values < 0.5, -0.0, values),
        lambda values: values * 1e-6,
    ]
    return kinds[seed % len(kinds)](made)


@pytest.mark.parametrize("kind", PACK)
def test_operators_pack_the_bytes_that_loops_do(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loops.build()
    if loops.loops() is None:
        pytest.skip("no compiler")
    cases = [blocks_to_fit(seed).view(-1, FORMATS[kind].elements) for seed in range(45)]
    by_loops = [PACK[kind](blocks.clone()) for blocks in cases]
    monkeypatch.setattr(ggml_packing, "loops", lambda: None)
    assert all(torch.equal(PACK[kind](blocks), packed) for blocks, packed in zip(cases, by_loops, strict=True))


@pytest.mark.parametrize("kind", PACK)
def test_what_is_packed_is_what_the_gguf_package_reads(kind: str) -> None:
    pytest.importorskip("gguf")
    for seed in range(9):
        packed = PACK[kind](blocks_to_fit(seed).view(-1, FORMATS[kind].elements))
        unpacked = torch.empty(len(packed), FORMATS[kind].elements)
        UNPACK[kind](packed, unpacked)
        assert torch.equal(torch.from_numpy(dequantized(kind, packed.numpy())), unpacked)


@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_is_off_by_a_sixteenth_or_the_smallest_code(shape: tuple[int, ...]) -> None:
    made = values(shape)
    values_again = requantised("fp8", made).double()
    rows, columns = shape[-2:]
    for matrix, back in zip(made.view(-1, rows, columns).double(), values_again.view(-1, rows, columns), strict=True):
        for top in range(0, rows, 128):
            for left in range(0, columns, 128):
                place = slice(top, top + 128), slice(left, left + 128)
                scale = matrix[place].abs().max() / 448
                bound = torch.maximum(matrix[place].abs() / 16, scale * 2.0**-10) * (1 + 2**-20)
                assert bool(((back[place] - matrix[place]).abs() <= bound).all())


@pytest.mark.parametrize("kind", ["q8_0", "fp8"])
def test_what_is_quantised_again_stays_what_it_is(kind: str) -> None:
    once = requantised(kind, torch.randn(128, 256, generator=torch.Generator().manual_seed(1)))
    assert torch.allclose(requantised(kind, once), once, rtol=2**-10, atol=0)


@pytest.mark.parametrize("kind", QUANTISES)
@pytest.mark.parametrize("columns", [64, 256])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_told(kind: str, columns: int, wrong: float) -> None:
    quantiser, made = QUANTISERS[kind], torch.ones(64, columns)
    quantiser.quantise(made.clone())
    made[40, 33] = wrong
    with pytest.raises(OverflowError):
        quantiser.quantise(made)


def test_a_block_whose_scale_has_no_float16_is_told() -> None:
    with pytest.raises(OverflowError):
        QUANTISERS["q8_0"].quantise(torch.full((1, 32), 1e7))


@pytest.mark.parametrize("kind", [kind for kind in QUANTISES if kind != "fp8"])
@pytest.mark.parametrize("columns", [32, 256])
def test_so_is_one_whose_scale_of_scales_has_none(kind: str, columns: int) -> None:
    made = torch.full((1, columns), 1e9)
    made[0, 0] = -1e9
    with pytest.raises(OverflowError):
        QUANTISERS[kind].quantise(made)


def test_the_formats_are_those_that_the_config_may_name() -> None:
    assert tuple(QUANTISERS) == QUANTISES


@pytest.mark.parametrize("kind", QUANTISES)
@pytest.mark.parametrize(
    "header", [("float32", (64,)), ("float32", (64, 40)), ("int64", (64, 64)), ("float32", (0, 64))]
)
def test_what_does_not_fit_is_told_by_its_header(kind: str, header: tuple[str, tuple[int, ...]]) -> None:
    assert not QUANTISERS[kind].fits(TensorHeader(*header))
