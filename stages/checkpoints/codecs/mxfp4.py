"""MXFP4, as gpt-oss has it: stacks of experts in four bits a value, 32 values to a scale that is a power of two.

At rest a stack is ``X_blocks`` [experts, rows, groups, 16], two values a byte, the low one first, and ``X_scales``
[experts, rows, groups], exponents with 127 added. In use it is ``X`` [experts, 32 · groups, rows]: transposed. A byte
and the scale beside it are the index of a table that has both values as they are used, so every byte costs one look-up,
and what comes out is what ``torch.ldexp`` gives for it, at the ends of the exponents too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.codecs.loops import Loop, loops
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent, TensorHeader
from offstage.stages.checkpoints.packed import BLOCK_BYTES, AtRest, PackedBlock, PackedTensor
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine.aligned_memory import Bytes
from offstage.stages.units import DTYPE_BYTES

STACKS = ("gate_up_proj", "down_proj")
"""What the parameters are called that transformers unpacks."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_GROUP_BYTES = 16
_WORD_BYTES = 4
"""Bytes of a row that are brought to their place together, as one word with a scale beside each."""
_GROUP_WORDS = _GROUP_BYTES // _WORD_BYTES
_TILE_WORDS = 2**16
"""Words that are looked up at a time: few enough for a core's cache, so many that threads seldom want Python's lock."""
_SCALE_OF_EACH = np.uint64(0x0100010001000100)

Numbers = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Unpacks a stack of experts. Its blocks are counted in rows at rest, those of all experts one after the other."""

    name: str = "mxfp4"
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")

    def blocks(self, tensor: PackedTensor) -> tuple[PackedBlock, ...]:
        """Return runs of rows, which become columns: in each of their lines they fill whole cache lines."""
        experts, columns, rows = tensor.shape
        step = max(1, BLOCK_BYTES // max(1, columns * int(DTYPE_BYTES[tensor.dtype])))
        step = step // 32 * 32 or step
        cuts = pairwise((*range(0, experts * rows, step), experts * rows)) if tensor.bytes else ()
        return tuple(PackedBlock(_spans(tensor, begin, end), begin, end) for begin, end in cuts)

    def unpack(self, tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes) -> None:
        """Write the rows of ``block`` as columns of their experts."""
        _, columns, rows = tensor.shape
        table = _table(tensor.dtype)
        half = np.dtype(f"u{table.itemsize // 2}")
        stack = target.view(half).reshape(tensor.shape)
        codes = data[0].reshape(-1, columns // 2)
        scales = data[1].reshape(len(codes), -1)
        begin, known = block.begin, loops()
        while begin < block.end:
            expert, row = divmod(begin, rows)
            end = min(block.end, begin + rows - row)
            part = slice(begin - block.begin, end - block.begin)
            what = codes[part], scales[part], table, stack[expert, :, row : row + end - begin]
            if known is None:
                _unpack(*what)
            else:
                known.mxfp4(*what).run()
            begin = end

    def loop(self, tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes) -> Loop | None:
        """Return what unpacks ``block`` at once; null where it has rows of several experts."""
        rows = tensor.shape[-1]
        known, (expert, row) = loops(), divmod(block.begin, rows)
        count = block.end - block.begin
        if known is None or row + count > rows:
            return None
        table = _table(tensor.dtype)
        stack = target.view(np.dtype(f"u{table.itemsize // 2}")).reshape(tensor.shape)
        codes, scales = (part.reshape(count, -1) for part in data)
        return known.mxfp4(codes, scales, table, stack[expert, :, row : row + count])

    def tables(self, tensor: PackedTensor) -> tuple[torch.Tensor, ...]:
        """Return the two values of each scale and byte, as one number."""
        return (_device_table(tensor.dtype),)

    def scratch_bytes(self, tensor: PackedTensor, block: PackedBlock) -> int:
        """Return what the indices, the scales on their way to them, and the values take."""
        codes, scales = (span.bytes for span in block.spans)
        return (4 + 2 * int(DTYPE_BYTES[tensor.dtype])) * codes + 8 * scales

    def unpack_on_device(
        self,
        tensor: PackedTensor,
        block: PackedBlock,
        data: Sequence[torch.Tensor],
        tables: Sequence[torch.Tensor],
        target: torch.Tensor,
    ) -> None:
        """Write the rows of ``block`` as columns of their experts."""
        _, columns, rows = tensor.shape
        indices = data[0].view(-1, _GROUP_BYTES).to(torch.int32)
        indices += data[1].view(-1, 1).to(torch.int32) * 256
        width = {2: torch.int16, 4: torch.int32}[torch_dtype(tensor.dtype).itemsize]
        lines = tables[0].index_select(0, indices.view(-1)).view(width).view(-1, columns)
        stack = target.view(width).view(tensor.shape)
        begin = block.begin
        while begin < block.end:
            expert, row = divmod(begin, rows)
            end = min(block.end, begin + rows - row)
            some = lines[begin - block.begin : end - block.begin]
            stack[expert, :, row : row + end - begin].copy_(some.T)
            begin = end

    def rows(self, tensor: PackedTensor, begin: int, end: int) -> PackedTensor:
        """Return experts ``begin`` to ``end``, which lie side by side at rest."""
        parts = tuple(part.rows(begin, end) for part in tensor.parts)
        return replace(tensor, parts=parts, shape=(end - begin, *tensor.shape[1:]))


def fold_mxfp4(entries: Mapping[str, Extent], quantization: Mapping[str, object]) -> dict[str, AtRest]:
    """Return ``entries`` with one packed tensor in the place of each stack's blocks and scales.

    All that ``quantization``, the config's, says beside the method is told by the names. A ``CheckpointError`` names
    the tensor that isn't what the other one needs.
    """
    stacks = {name: stack for name in entries if (stack := _stack_of(name))}
    folded: dict[str, AtRest] = {name: extent for name, extent in entries.items() if name not in stacks}
    for name, stack in stacks.items():
        if f"{stack}_blocks" not in entries:
            raise _refused(entries[name], f"{name!r} has no {stack + '_blocks'!r} beside it")
        folded[stack] = _folded(entries, stack)
    return folded


def declare_mxfp4(name: str, weight: TensorHeader, quantization: Mapping[str, object]) -> dict[str, TensorHeader]:
    """Return what the stack ``name`` rests as: the entries of which ``fold_mxfp4`` makes it again.

    What isn't such a stack stays as it is, whatever ``quantization`` says beside the method.
    """
    if name.rpartition(".")[2] not in STACKS or len(weight.shape) != 3:
        return {name: weight}
    experts, columns, rows = weight.shape
    if columns % (2 * _GROUP_BYTES):
        raise CheckpointError(
            f"config.json: {name!r} has {columns} values in a row, and mxfp4 a scale for each {2 * _GROUP_BYTES}"
        )
    groups = columns // (2 * _GROUP_BYTES)
    blocks = TensorHeader("uint8", (experts, rows, groups, _GROUP_BYTES))
    return {f"{name}_blocks": blocks, f"{name}_scales": TensorHeader("uint8", (experts, rows, groups))}


def sample() -> tuple[PackedTensor, PackedBlock, list[Bytes]]:
    """Return a made-up stack of one expert that is a block, that block, and its data."""
    rows, groups = 1024, 64
    random = np.random.default_rng(0)
    codes = random.integers(256, size=rows * groups * _GROUP_BYTES, dtype=np.uint8)
    scales = random.integers(110, 125, size=rows * groups, dtype=np.uint8)
    file = ShardFile("sample", Path("sample"), codes.size + scales.size, None, "")
    parts = (
        Extent(file, 0, "uint8", (1, rows, groups, _GROUP_BYTES)),
        Extent(file, codes.size, "uint8", (1, rows, groups)),
    )
    tensor = PackedTensor(Mxfp4(), parts, "bfloat16", (1, groups * _GROUP_BYTES * 2, rows))
    (block,) = tensor.codec.blocks(tensor)
    return tensor, block, [codes, scales]


def _stack_of(name: str) -> str | None:
    """Return the stack that the tensor ``name`` is the blocks or the scales of; null for all others."""
    stack, _, kind = name.rpartition("_")
    return stack if kind in ("blocks", "scales") and stack.rpartition(".")[2] in STACKS else None


def _folded(entries: Mapping[str, Extent], stack: str) -> PackedTensor:
    blocks, scales = entries[f"{stack}_blocks"], entries.get(f"{stack}_scales")
    if scales is None:
        raise _refused(blocks, f"{stack + '_blocks'!r} has no {stack + '_scales'!r} beside it")
    if stack in entries:
        raise _refused(blocks, f"{stack!r} is there both in blocks and as it is")
    for extent, shape in ((blocks, (*blocks.shape[:3], _GROUP_BYTES)), (scales, blocks.shape[:3])):
        if len(blocks.shape) != 4 or extent.dtype != "uint8" or extent.shape != shape:
            each = " and ".join(f"{part.dtype} {list(part.shape)}" for part in (blocks, scales))
            raise _refused(
                extent,
                f"the blocks and scales of {stack!r} are {each}, where mxfp4 has uint8 [experts, rows, groups, 16] "
                "and the same without the 16",
            )
    experts, rows, groups, _ = blocks.shape
    return PackedTensor(Mxfp4(), (blocks, scales), "bfloat16", (experts, groups * _GROUP_BYTES * 2, rows))


def _refused(extent: Extent, what: str) -> CheckpointError:
    return CheckpointError(f"{extent.file.path}: {what}; get the checkpoint again")


def _spans(tensor: PackedTensor, begin: int, end: int) -> tuple[Extent, ...]:
    """Return where the rows ``begin`` to ``end`` of all experts lie: their codes, and their scales."""
    return tuple(_by_row(part).rows(begin, end).as_bytes for part in tensor.parts)


def _by_row(part: Extent) -> Extent:
    experts, rows, *rest = part.shape
    return Extent(part.file, part.begin, part.dtype, (experts * rows, math.prod(rest)))


@lru_cache
def _table(dtype: str) -> Numbers:
    """Return for each scale and byte (``scale · 256 + byte``) the two values as one number, the low one's bits first.

    They are what transformers computes, by the same function.
    """
    kind = torch_dtype(dtype)
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=kind)
    exponents = torch.arange(256, dtype=torch.int32) - 127
    scaled = values.repeat(256, 1)
    torch.ldexp(scaled, exponents[:, None], out=scaled)
    bits = np.frombuffer(scaled.view(torch.uint8).numpy(), f"u{kind.itemsize}").reshape(256, 16)
    pairs = np.empty((256, 16, 16, 2), bits.dtype)
    pairs[..., 0], pairs[..., 1] = bits[:, None, :], bits[:, :, None]
    return pairs.reshape(-1).view(f"u{2 * kind.itemsize}")


@lru_cache
def _device_table(dtype: str) -> torch.Tensor:
    """Return the table as torch looks numbers up: of signed ones."""
    table = _table(dtype)
    return torch.from_numpy(table.view(f"i{table.itemsize}"))


def _unpack(codes: Bytes, scales: Bytes, table: Numbers, target: Numbers) -> None:
    """Write to ``target`` [columns, rows] the values of ``codes`` [rows, columns / 2] by ``scales`` [rows, groups]."""
    rows, width = codes.shape
    lines = target.reshape(-1, _WORD_BYTES, 2, rows)
    tall = min(rows, _TILE_WORDS // _GROUP_WORDS)
    wide = max(1, _TILE_WORDS // tall // _GROUP_WORDS)
    for top in range(0, rows, tall):
        down = slice(top, top + tall)
        for left in range(0, width // _GROUP_BYTES, wide):
            part = codes[down, left * _GROUP_BYTES : (left + wide) * _GROUP_BYTES]
            indices = _indices(part, scales[down, left : left + wide])
            _look_up(indices, table, lines[left * _GROUP_WORDS : (left + wide) * _GROUP_WORDS, ..., down])


def _indices(codes: Bytes, scales: Bytes) -> Numbers:
    """Return [words, rows, bytes]: each byte of ``codes`` with its scale above it, transposed word by word."""
    words = np.ascontiguousarray(codes.astype(np.uint16).view(np.uint64).T)
    groups = words.reshape(-1, _GROUP_WORDS, len(codes))
    np.bitwise_or(groups, (scales.T * _SCALE_OF_EACH)[:, None], out=groups)
    return words.view(np.uint16).reshape(*words.shape, _WORD_BYTES)


def _look_up(indices: Numbers, table: Numbers, lines: Numbers) -> None:
    """Write to ``lines`` [words, bytes, 2, rows] the two values of each of ``indices`` [words, rows, bytes]."""
    places = np.empty(indices.shape[:2], np.intp)
    pairs = np.empty(indices.shape[:2], table.dtype)
    for byte in range(_WORD_BYTES):
        np.copyto(places, indices[..., byte])
        np.take(table, places, out=pairs, mode="wrap")  # no mode is faster, and every index is in the table
        np.copyto(lines[:, byte, 0], pairs, casting="unsafe")
        np.right_shift(pairs, 8 * lines.itemsize, out=pairs)
        np.copyto(lines[:, byte, 1], pairs, casting="unsafe")
