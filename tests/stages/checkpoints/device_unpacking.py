"""Packed tensors of every codec that torch can unpack on a device, made up, for tests on whichever device there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offstage.stages.checkpoints.codecs.ggml_formats import FORMATS
from offstage.stages.checkpoints.codecs.gguf import Arrangement, GgufCodec
from offstage.stages.checkpoints.codecs.grouped_integers import GroupedIntegers
from offstage.stages.checkpoints.codecs.scaled_codes import MXFP4, PackedScales, ScaledCodes, table_codes
from offstage.stages.checkpoints.device_codec import DeviceCodec
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import Codec, MemoryFile, PackedTensor, in_memory
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine.aligned_memory import align_up
from offstage.stages.units import DEVICE_ALIGNMENT

_FILE = ShardFile("made up", Path("made up"), 0, None, "")
_RANDOM = np.random.default_rng(0)
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_of(
    codec: Codec, parts: Sequence[np.ndarray[Any, Any]], kinds: Sequence[str], dtype: str, shape: tuple[int, ...]
) -> PackedTensor:
    """Return a tensor whose ``parts``, of dtypes called ``kinds``, are in memory."""
    extents = tuple(Extent(_FILE, 0, kind, part.shape) for part, kind in zip(parts, kinds, strict=True))
    data = [np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in parts]
    return in_memory(PackedTensor(codec, extents, dtype, shape), data)


def unpacked_on(tensor: PackedTensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor`` unpacked on ``device``, block by block, as its dtype and shape."""
    codec = tensor.codec
    assert isinstance(codec, DeviceCodec)
    tables = [table.to(device) for table in codec.tables(tensor)]
    target = torch.zeros(tensor.bytes, dtype=torch.uint8, device=device)
    for block in codec.blocks(tensor):
        landing = torch.zeros(
            sum(align_up(span.bytes, DEVICE_ALIGNMENT) for span in block.spans), dtype=torch.uint8, device=device
        )
        data, begin = [], 0
        for span in block.spans:
            assert isinstance(span.file, MemoryFile)
            data.append(landing[begin : begin + span.bytes])
            data[-1].copy_(torch.from_numpy(span.file.bytes_of(span).copy()))
            begin += align_up(span.bytes, DEVICE_ALIGNMENT)
        codec.unpack_on_device(tensor, block, data, tables, target)
    return target.view(getattr(torch, tensor.dtype)).view(tensor.shape).cpu()


def same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether all numbers are alike to the bit, and what is no number is none in both."""
    kind, lost = _INTEGERS[one.dtype.itemsize], one.isnan()
    alike = one.view(kind)[~lost], other.view(kind)[~lost]
    return one.dtype == other.dtype and torch.equal(lost, other.isnan()) and torch.equal(*alike)


def _bytes(*shape: int) -> np.ndarray[Any, Any]:
    """Return every byte there is, again and again in another order."""
    count = int(np.prod(shape))
    every = np.concatenate([_RANDOM.permutation(256) for _ in range(-(-count // 256))])
    return every[:count].astype(np.uint8).reshape(shape)


def _scales(dtype: str, *shape: int) -> np.ndarray[Any, Any]:
    """Return scales of any bits at all, every third one of a usual size."""
    width = {"float32": 4, "bfloat16": 2, "float16": 2}.get(dtype, 1)
    made = _RANDOM.integers(256, size=(int(np.prod(shape)), width), dtype=np.uint8)
    if dtype == "float32":
        made[::3] = (_RANDOM.random((len(made[::3]), 1)) * 1e-3).astype(np.float32).view(np.uint8)
    return made.view(f"u{width}").reshape(shape)


_GRIDS = {
    "blocks": ((256, 384), (128, 128)),
    "blocks that are cut short": ((200, 330), (128, 128)),
    "rows": ((70, 96), (1, 96)),
    "runs": ((37, 96), (1, 32)),
    "all": ((64, 96), (64, 96)),
    "a stack": ((3, 130, 64), (64, 32)),
    "blocks that a read cuts": ((3, 2**20), (3, 2**18)),
}


def block_scaled() -> Iterator[tuple[str, PackedTensor]]:
    """Yield tensors of FP8, FP4, INT8 and INT4 with scales of every dtype and shape."""
    for name in ("fp8", "fp4", "int8", "int4"):
        for label, (shape, (height, width)) in _GRIDS.items():
            for dtype in ("float32", "bfloat16", "float16", "float8_e8m0fnu", "uint8"):
                if (label != "runs" and dtype != "float32") or (label == "blocks that a read cuts" and name != "fp8"):
                    continue
                codes = _bytes(*shape[:-1], shape[-1] // (2 if name in ("fp4", "int4") else 1))
                grid = (*shape[:-2], -(-shape[-2] // height), -(-shape[-1] // width))
                tensor = tensor_of(
                    ScaledCodes(name, height, width),
                    [codes, _scales(dtype, *grid)],
                    ["uint8", dtype],
                    "bfloat16",
                    shape,
                )
                yield f"{name}, {label}, scales in {dtype}", tensor
    codes, scales = _bytes(64, 96), _scales("float8_e4m3fn", 64, 12)
    parts, kinds = [codes, scales, np.array([1234.5], np.float32)], ["uint8", "float8_e4m3fn", "float32"]
    yield "nvfp4", tensor_of(ScaledCodes("fp4", 1, 16), parts, kinds, "bfloat16", (64, 192))


def mxfp4() -> Iterator[tuple[str, PackedTensor]]:
    """Yield stacks of experts: every byte at every scale, and blocks that go on in the next expert."""
    every = np.arange(256, dtype=np.uint8)
    blocks, scales = np.tile(every, (256, 1)).reshape(1, 256, 16, 16), np.repeat(every, 16).reshape(1, 256, 16)
    yield "mxfp4, every byte", tensor_of(MXFP4, [blocks, scales], ["uint8"] * 2, "bfloat16", (1, 512, 256))
    blocks, scales = _bytes(3, 1000, 25, 16), _scales("uint8", 3, 1000, 25)
    yield "mxfp4, of experts", tensor_of(MXFP4, [blocks, scales], ["uint8"] * 2, "bfloat16", (3, 800, 1000))


def table_scaled() -> Iterator[tuple[str, PackedTensor]]:
    """Yield tensors of four bits by a table, their scales plain and packed."""
    values = tuple(map(float, _RANDOM.standard_normal(16).astype(np.float32)))
    codec = table_codes(values, 64, None, ("bfloat16",))
    parts = [_bytes(96 * 128 // 2), _scales("float32", 96 * 2)]
    yield "nf4", tensor_of(codec, parts, ["uint8", "float32"], "bfloat16", (96, 128))
    above = PackedScales(tuple(map(float, _RANDOM.standard_normal(256).astype(np.float32))), 256, 0.0517)
    codec = table_codes(values, 64, above, ("bfloat16",))
    parts = [_bytes(1700 * 64 * 20 // 2), _bytes(1700 * 20), _RANDOM.random(133).astype(np.float32)]
    yield "nf4, scales packed", tensor_of(codec, parts, ["uint8", "uint8", "float32"], "bfloat16", (1700, 64 * 20))


def grouped_integers() -> Iterator[tuple[str, PackedTensor]]:
    """Yield tensors of GPTQ and AWQ of any bytes at all: their inputs in order, and in none."""
    outputs, inputs, group = 2080, 1056, 48
    for bits, reordered, awq in [
        (2, False, False),
        (3, True, False),
        (4, True, False),
        (8, False, False),
        (4, False, True),
    ]:
        packed, groups = outputs * bits // 32, inputs // group
        codes = _bytes(*((inputs, packed * 4) if awq else (inputs * bits // 32, outputs * 4))).view(np.int32)
        parts = [codes, _scales("float16", groups, outputs), _bytes(groups, packed * 4).view(np.int32)]
        kinds = ["int32", "float16", "int32"]
        if reordered:
            parts, kinds = [*parts, _RANDOM.permutation(inputs).astype(np.int32) % groups], [*kinds, "int32"]
        name = f"{'awq' if awq else 'gptq'}{bits}"
        codec = GroupedIntegers(name, bits, group, reordered, not awq, awq)
        yield name, tensor_of(codec, parts, kinds, "bfloat16", (outputs, inputs))


def ggml() -> Iterator[tuple[str, PackedTensor]]:
    """Yield tensors of each of ggml's types, of any bytes at all, and of each arrangement."""
    for kind, form in FORMATS.items():
        part = _RANDOM.integers(256, size=(40, 512 // form.elements * form.bytes), dtype=np.uint8)
        yield kind, tensor_of(GgufCodec((kind,)), [part], ["uint8"], "bfloat16", (40, 512))
    arrangements = {
        "swapped": (Arrangement(swapped=(2, 4, 3, 5)), (120, 256)),
        "transposed": (Arrangement(transposed=True), (256, 120)),
        "less": (Arrangement(less=1.0), (120, 256)),
    }
    for label, (arrangement, shape) in arrangements.items():
        part = _RANDOM.integers(256, size=(120, 256 // 32 * 34), dtype=np.uint8)
        yield f"q8_0, {label}", tensor_of(GgufCodec(("q8_0",), arrangement), [part], ["uint8"], "bfloat16", shape)
    halves = [_RANDOM.integers(256, size=(60, 256 // 32 * 34), dtype=np.uint8) for _ in range(2)]
    yield "q8_0 in halves", tensor_of(GgufCodec(("q8_0", "q8_0")), halves, ["uint8"] * 2, "bfloat16", (4, 30, 256))


TENSORS = dict([*block_scaled(), *mxfp4(), *table_scaled(), *grouped_integers(), *ggml()])
"""All of them by what they are."""
