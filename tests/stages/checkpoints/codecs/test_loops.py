"""The compiled loops unpack to the very bits of the operators: all codes, odd scales, odd shapes, any place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offstage.stages.checkpoints.codecs import loops, planes
from offstage.stages.checkpoints.codecs.ggml_formats import FORMATS
from offstage.stages.checkpoints.codecs.gguf import Arrangement, GgufCodec
from offstage.stages.checkpoints.codecs.scaled_codes import MXFP4, RUNS, ScaledCodes, table_codes
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import PackedTensor
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine.aligned_memory import byte_view

DTYPES = ("bfloat16", "float16", "float32")
ODD = [0.0, -0.0, 1e-45, 1e-41, 1.2e-38, 6e-8, 1e-5, 3.0, -0.7, 300.0, 1e30, 3e38, np.inf, -np.inf, np.nan]
Both = Callable[[PackedTensor], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def both(compiled_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Both:
    """What unpacks a tensor by operators, and by the loops."""

    def unpacked(tensor: PackedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert loops.loops() is None
        by_operators = read_extent(tensor)
        with monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(compiled_cache))
            assert loops.loops() is not None
            return by_operators, read_extent(tensor)

    return unpacked


def packed_at(path: Path, codec: Any, shape: tuple[int, ...], *parts: tuple[Any, str]) -> PackedTensor:
    """Return a tensor of ``shape`` whose ``parts`` (numbers, dtype) lie in the file ``path``, at odd places."""
    path.write_bytes(b"odd" + b"".join(part.tobytes() for part, _ in parts))
    file, begin, extents = ShardFile(path.name, path, path.stat().st_size, None, ""), 3, []
    for part, dtype in parts:
        extents.append(Extent(file, begin, dtype, part.shape))
        begin += part.nbytes
    return PackedTensor(codec, tuple(extents), "bfloat16", shape)


def assert_same_bits(by_operators: torch.Tensor, by_loops: torch.Tensor) -> None:
    """Hold all numbers against each other to the bit; what is no number must be none in both."""
    kind = {2: torch.int16, 4: torch.int32}[by_loops.itemsize]
    nan = by_operators.isnan()
    assert torch.equal(nan, by_loops.isnan())
    assert torch.equal(by_operators.view(kind)[~nan], by_loops.view(kind)[~nan])


def odd_scales(*shape: int) -> Any:
    """Return scales of which the first are subnormal, huge, zero, infinite or no number, the others of all sizes."""
    random = np.random.default_rng(sum(shape))
    made = np.exp2(random.uniform(-40, 20, shape)).astype(np.float32)
    made.reshape(-1)[: len(ODD)] = ODD[: made.size]
    return made


CUT = {"of blocks": ((300, 520), (128, 128)), "of thin blocks": ((17, 96), (1, 16)), "of rows": ((40, 70), (1, 70))}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", ["fp8", "int8", "fp4", "int4"])
@pytest.mark.parametrize("case", CUT)
def test_scaled_codes(tmp_path: Path, both: Both, case: str, code: Any, dtype: str) -> None:
    (rows, columns), (tall, wide) = CUT[case]
    bytes_a_row = columns if code.endswith("8") else columns // 2
    codes = (np.arange(2 * rows * bytes_a_row) * 37 % 256).astype(np.uint8).reshape(2, rows, bytes_a_row)
    scales = odd_scales(2, -(-rows // tall), -(-columns // wide))
    parts = (codes, "uint8"), (scales, "float32")
    tensor = packed_at(tmp_path / "f", ScaledCodes(code, tall, wide), (2, rows, columns), *parts)
    assert_same_bits(*both(replace(tensor, dtype=dtype)))


def test_every_code_of_eight_bits_at_every_sixteenth_scale_there_is(tmp_path: Path, both: Both) -> None:
    scales = (np.arange(2**16, dtype=np.uint32) << 16 | 0x8421).view(np.float32)[::16, None]
    codes = np.tile(np.arange(256, dtype=np.uint8), (len(scales), 1))
    for dtype in DTYPES:
        parts = (codes, "uint8"), (scales, "float32")
        tensor = packed_at(tmp_path / dtype, ScaledCodes("fp8", 1, 256), codes.shape, *parts)
        assert_same_bits(*both(replace(tensor, dtype=dtype)))


def test_a_dtype_without_a_loop_is_left_to_the_operators(tmp_path: Path, both: Both) -> None:
    codes, scales = np.arange(256, dtype=np.uint8).reshape(2, 128), np.ones((2, 1), np.float32)
    parts = (codes, "uint8"), (scales, "float32")
    tensor = replace(packed_at(tmp_path / "f", ScaledCodes("fp8", 1, 128), (2, 128), *parts), dtype="float64")
    one, other = both(tensor)
    assert one.dtype == torch_dtype("float64")
    assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_codes_of_a_table_in_runs_of_every_length(tmp_path: Path, both: Both) -> None:
    for run in RUNS:
        codes = np.random.default_rng(run).integers(256, size=12 * run // 2, dtype=np.uint8)
        values = (*map(float, np.linspace(-1, 1, 15, dtype=np.float32)), -0.0)
        parts = (codes, "uint8"), (odd_scales(12), "float32")
        for dtype in DTYPES:
            tensor = packed_at(tmp_path / dtype, table_codes(values, run, None, DTYPES), (3, 4 * run), *parts)
            assert_same_bits(*both(replace(tensor, dtype=dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 256, 16), (3, 5, 2), (9, 1000, 25)], ids=["all", "odd", "of several blocks"])
def test_stacks_of_mxfp4(tmp_path: Path, both: Both, shape: tuple[int, int, int], dtype: str) -> None:
    experts, rows, groups = shape
    every = np.arange(experts * rows * groups * 16, dtype=np.uint32)
    codes, scales = (every + every // 256 % 7).astype(np.uint8), (every[: every.size // 16] // groups).astype(np.uint8)
    parts = (codes.reshape(*shape, 16), "uint8"), (scales.reshape(shape), "uint8")
    tensor = packed_at(tmp_path / "f", MXFP4, (experts, groups * 32, rows), *parts)
    assert_same_bits(*both(replace(tensor, dtype=dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beyond", [0, 1])
def test_tiles_of_mxfp4_whose_scales_are_the_last_of_full_precision_or_the_first_beyond(
    tmp_path: Path, both: Both, beyond: int, dtype: str
) -> None:
    least, most = (114, 140) if dtype == "float16" else (2, 252)
    ends = np.array([least - beyond, 127, most, 127, least, most + beyond], np.uint8)
    codes, scales = np.arange(64 * 6 * 16, dtype=np.uint32).astype(np.uint8), np.resize(ends, (1, 64, 6))
    parts = (codes.reshape(1, 64, 6, 16), "uint8"), (scales, "uint8")
    tensor = packed_at(tmp_path / "f", MXFP4, (1, 192, 64), *parts)
    assert_same_bits(*both(replace(tensor, dtype=dtype)))


LAYOUTS = {"rows": (Arrangement(), (40, 512)), "swapped rows": (Arrangement((2, 10, 2, 1)), (40, 512))}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [name for name, form in FORMATS.items() if form.elements > 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_ggml_of_any_bytes(tmp_path: Path, both: Both, layout: str, kind: str, dtype: str) -> None:
    arrangement, shape = LAYOUTS[layout]
    form = FORMATS[kind]
    size = shape[0], shape[1] // form.elements * form.bytes
    blocks = np.random.default_rng(form.code).integers(256, size=size, dtype=np.uint8)
    tensor = packed_at(tmp_path / "f", GgufCodec((kind,), arrangement), shape, (blocks, "uint8"))
    with np.errstate(all="ignore"):
        assert_same_bits(*both(replace(tensor, dtype=dtype)))


def test_the_halves_of_a_stack_and_what_is_left_to_operators(tmp_path: Path, both: Both) -> None:
    blocks = np.random.default_rng(0).integers(60, size=(6, 2 * 34), dtype=np.uint8)
    for arrangement in (Arrangement(), Arrangement(less=1.0), Arrangement(transposed=True)):
        parts = [(blocks, "uint8")] * (1 if arrangement.transposed else 2)
        codec = GgufCodec(("q8_0",) * len(parts), arrangement)
        shape = (64, 6) if arrangement.transposed else (3, 4, 64)
        assert_same_bits(*both(packed_at(tmp_path / "f", codec, shape, *parts)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_planes_of_all_bits(tmp_path: Path, both: Both, dtype: str) -> None:
    kind = torch_dtype(dtype)
    words = np.random.default_rng(0).integers(256, size=(planes.TILE_ELEMENTS + 77) * kind.itemsize, dtype=np.uint8)
    count = words.size // kind.itemsize
    tiles = [
        planes.pack_tile(words[begin * kind.itemsize : end * kind.itemsize], dtype, planes.new_compressor())
        for begin, end in planes.tile_borders(count, count)
    ]
    frames = np.frombuffer(b"".join(frame for tile in tiles for frame in tile), np.uint8)
    codec = planes.PlaneCodec(dtype, count, tuple(tuple(map(len, tile)) for tile in tiles))
    by_operators, by_loops = both(replace(packed_at(tmp_path / "f", codec, (count,), (frames, "uint8")), dtype=dtype))
    for made in (by_operators, by_loops):
        assert bytes(byte_view(made)) == words.tobytes()


def test_a_loop_is_given_no_sizes_that_its_arrays_have_not(
    compiled_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_cache))
    known = loops.loops()
    assert known is not None
    codes, scales = np.zeros((4, 32), np.uint8), np.ones((2, 2), np.float32).view(np.uint8)
    made, layout = (
        np.zeros((4, 64), np.uint8),
        loops.ScaleLayout(code="fp8", scale_dtype="float32", inside=0, block=(2, 16)),
    )
    scaled = partial(known.scaled, dtype="bfloat16")
    scaled(codes, scales, made, layout=layout).run()
    for inside, block, target in ((0, (1, 16), made), (0, (2, 15), made), (0, (2, 16), made[:3]), (1, (2, 16), made)):
        with pytest.raises(AssertionError):
            scaled(codes, scales, target, layout=layout._replace(inside=inside, block=block))
    with pytest.raises(AssertionError):
        scaled(codes[:, ::2], scales, made[:, :32], layout=layout._replace(block=(2, 8)))
    with pytest.raises(AssertionError):
        scaled(codes, scales[:-1], made, layout=layout)
    with pytest.raises(AssertionError):
        known.merge_planes(codes[0], codes[1], made[0].view(np.uint16)[1:])
    blocks, rows = np.zeros((2, 1, 34), np.uint8), np.zeros((2, 64), np.uint8)
    known.ggml(blocks, rows, kind="q8_0", dtype="bfloat16", places=np.array([1, 0])).run()
    for places in ([0, 2], [-1, 0], [0]):
        with pytest.raises(AssertionError):
            known.ggml(blocks, rows, kind="q8_0", dtype="bfloat16", places=np.array(places))
