"""What floats are quantised to: the bytes that others' code makes, within a format's bounds, as codecs read them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from offstage.stages.checkpoints.codecs.quantisers import QUANTISERS
from offstage.stages.checkpoints.extents import Extent, TensorHeader
from offstage.stages.checkpoints.packed import PackedTensor, memory_file
from offstage.stages.checkpoints.quantization import QUANTISES
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.checkpoints.shard_files import ShardFile

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


@pytest.mark.parametrize("kind", QUANTISES)
def test_what_is_quantised_again_stays_what_it_is(kind: str) -> None:
    once = requantised(kind, torch.randn(128, 256, generator=torch.Generator().manual_seed(1)))
    assert torch.allclose(requantised(kind, once), once, rtol=2**-10, atol=0)


@pytest.mark.parametrize("kind", QUANTISES)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_told(kind: str, wrong: float) -> None:
    quantiser, made = QUANTISERS[kind], torch.ones(64, 64)
    assert quantiser.are_sound(quantiser.quantise(made.clone()))
    made[40, 33] = wrong
    assert not quantiser.are_sound(quantiser.quantise(made))


def test_a_block_whose_scale_has_no_float16_is_told() -> None:
    quantiser = QUANTISERS["q8_0"]
    assert not quantiser.are_sound(quantiser.quantise(torch.full((1, 32), 1e7)))


def test_the_formats_are_those_that_the_config_may_name() -> None:
    assert tuple(QUANTISERS) == QUANTISES


@pytest.mark.parametrize("kind", QUANTISES)
@pytest.mark.parametrize(
    "header", [("float32", (64,)), ("float32", (64, 40)), ("int64", (64, 64)), ("float32", (0, 64))]
)
def test_what_does_not_fit_is_told_by_its_header(kind: str, header: tuple[str, tuple[int, ...]]) -> None:
    assert not QUANTISERS[kind].fits(TensorHeader(*header))
