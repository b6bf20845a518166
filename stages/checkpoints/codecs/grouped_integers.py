"""Weights in integers of two to eight bits with a scale and a zero for each group of inputs: GPTQ's and AWQ's.

What comes out is ``(code - zero) * scale``: the difference is exact, and the product is rounded in the dtype of the
scales, as the libraries' own torch code computes it; then it is cast to the dtype in use.

At rest a row is an input, and a column an output; in use it is the other way round. Numbers of 32 bits have several
codes, the lowest bits first: of GPTQ those of neighbouring inputs, so that three bits make 32 codes of three numbers;
of AWQ those of eight outputs, in an order of its own. Zeros are packed along the outputs by both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from offstage.stages.checkpoints.codecs.scaled_codes import DTYPES
from offstage.stages.checkpoints.device_codec import DeviceCodec, most_at_once
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import BLOCK_BYTES, PackedBlock, PackedTensor
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine.aligned_memory import Bytes
from offstage.stages.units import DTYPE_BYTES

NAMES = ("gptq2", "gptq3", "gptq4", "gptq8", "awq4")
"""What rates of such integers are known by."""
_ROWS_TOGETHER = 64
"""Inputs that become columns are cut so that these fill whole cache lines in use."""
_SCRATCH = 16
"""What the operators hold of a value at most: a code, a zero, and what these are made of."""
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each four bits of AWQ's numbers are of."""
_ONES = {
    2: (0x55555555,),
    3: (0x24924924, 0x92492492, 0x49249249),
    4: (0x11111111,),
    8: (0x01010101,),
}
"""What GPTQ's library adds to whole numbers of zeros, carries included, that rest as one less than they mean; of three
bits too, where these ones aren't in the lowest place of each: its writer subtracts the same.
"""


def codes_together(bits: int) -> tuple[int, int]:
    """Return how many codes of so many ``bits`` fill whole numbers of 32, and how many numbers these are."""
    whole = math.lcm(bits, 32)
    return whole // bits, whole // 32


@dataclass(frozen=True, slots=True)
class GroupedIntegers(DeviceCodec):
    """Matrices [outputs, inputs] of integers of so many ``bits``; each ``group`` of inputs has its scales and zeros.

    A tensor's parts are its codes, scales [groups, outputs] and zeros, which may rest ``less_one``; and the group of
    each input, if these are ``reordered``. Codes that are ``interleaved`` are packed as AWQ packs them.

    Its blocks are counted in inputs.
    """

    name: str
    bits: int
    group: int
    reordered: bool = False
    less_one: bool = False
    interleaved: bool = False
    dtypes: tuple[str, ...] = DTYPES

    @property
    def _rows_alone(self) -> int:
        """How few inputs can be told apart from others at rest."""
        return 1 if self.interleaved else codes_together(self.bits)[0]

    def blocks(self, tensor: PackedTensor) -> tuple[PackedBlock, ...]:
        """Return the blocks of ``tensor``: inputs, that is columns in use."""
        outputs, inputs = tensor.shape
        height = max(self._rows_alone, int(BLOCK_BYTES // (outputs * DTYPE_BYTES[tensor.dtype])))
        height -= height % (_ROWS_TOGETHER if height > _ROWS_TOGETHER else self._rows_alone)
        edges = pairwise([*range(0, inputs, height), inputs])
        return tuple(PackedBlock(self._spans(tensor, begin, end), begin, end) for begin, end in edges)

    def _spans(self, tensor: PackedTensor, begin: int, end: int) -> tuple[Extent, ...]:
        """Return where the codes of inputs ``begin`` to ``end`` lie, and the scales and zeros of their groups."""
        codes, scales, zeros, *groups = tensor.parts
        inputs = tensor.shape[1]
        first, last = self._groups(tensor, begin, end)
        return (
            codes.rows(begin * codes.shape[0] // inputs, end * codes.shape[0] // inputs).as_bytes,
            scales.rows(first, last).as_bytes,
            zeros.rows(first, last).as_bytes,
            *(part.rows(begin, end).as_bytes for part in groups),
        )

    def _groups(self, tensor: PackedTensor, begin: int, end: int) -> tuple[int, int]:
        """Return from which group to which the inputs ``begin`` to ``end`` are of: all, where they are reordered."""
        return (0, tensor.parts[1].shape[0]) if self.reordered else (begin // self.group, -(-end // self.group))

    def loop(self, tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes) -> None:
        """Return nothing: operators unpack."""

    def rows(self, tensor: PackedTensor, begin: int, end: int) -> PackedTensor | None:
        """Return all rows; null for fewer, since those of a file are inputs."""
        return tensor if (begin, end) == (0, tensor.shape[0]) else None

    def tables(self, tensor: PackedTensor) -> tuple[torch.Tensor, ...]:
        """Return where the bits of each code are, and what is added to zeros."""
        return _places(self.bits, interleaved=self.interleaved), _ones(self.bits, less_one=self.less_one)

    def scratch_bytes(self, tensor: PackedTensor, block: PackedBlock) -> int:
        """Return what codes, zeros and products take, and the group of each input."""
        return (_SCRATCH * tensor.shape[0] + 8) * (block.end - block.begin) + block.spans[2].bytes

    def unpack_on_device(
        self,
        tensor: PackedTensor,
        block: PackedBlock,
        data: Sequence[torch.Tensor],
        tables: Sequence[torch.Tensor],
        target: torch.Tensor,
    ) -> None:
        """Write the inputs of ``block`` as columns of ``target``."""
        outputs, inputs = tensor.shape
        count, (each, period) = block.end - block.begin, codes_together(self.bits)
        columns_target = target.view(torch_dtype(tensor.dtype)).view(outputs, inputs)[:, block.begin : block.end]
        words = data[0].view(torch.int32).view(count // self._rows_alone, -1, outputs // (8 if self.interleaved else 1))
        scales = data[1].view(torch_dtype(tensor.parts[1].dtype)).view(-1, outputs)
        zeros = data[2].view(torch.int32).view(len(scales), -1, period) + tables[1]
        groups = self._groups_of(tensor, block, data)
        most = most_at_once(target)
        tall = min(count, max(self._rows_alone, _ROWS_TOGETHER if most < columns_target.numel() else count))
        wide = min(outputs, max(1, most // tall // 32) * 32)
        for left in range(0, outputs, wide):
            right = min(left + wide, outputs)
            across = slice(left // each, right // each)
            for top in range(0, count, tall):
                bottom = min(top + tall, count)
                down, of = slice(top // self._rows_alone, bottom // self._rows_alone), groups[top:bottom]
                codes = words[down, :, across if self.interleaved else slice(left, right)]
                values = self._codes(codes, tables[0]).reshape(bottom - top, -1)
                values.sub_(self._zeros(zeros[:, across], of, tables[0]).reshape(bottom - top, -1))
                product = values.to(scales.dtype).mul_(scales[:, left:right].index_select(0, of))
                columns_target[left:right, top:bottom].copy_(product.T)

    def _groups_of(self, tensor: PackedTensor, block: PackedBlock, data: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return which of the scales and zeros in ``data`` each input of ``block`` has."""
        if self.reordered:
            return data[3].view(torch.int32)
        every = torch.arange(block.begin, block.end, dtype=torch.int32, device=data[0].device)
        return every.floor_divide_(self.group).sub_(self._groups(tensor, block.begin, block.end)[0])

    def _codes(self, words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the codes of ``words`` (…, numbers, outputs) of GPTQ in the place of the numbers; of AWQ (rows, 1,
        numbers), as rows of outputs.
        """
        return _apart(words.mT if self.interleaved else words, places, dim=2 if self.interleaved else 1)

    def _zeros(self, words: torch.Tensor, groups: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the zeros of each input by its group, of ``words`` [groups, …, numbers]; fewer are taken apart."""
        if len(words) < len(groups):
            return _apart(words, places, dim=2).index_select(0, groups)
        return _apart(words.index_select(0, groups), places, dim=2)


def _apart(words: torch.Tensor, places: torch.Tensor, *, dim: int) -> torch.Tensor:
    """Return the codes of ``words``, whose dimension ``dim`` has those numbers that make whole codes together."""
    low, shifts, masks, high, above, masks_above = places.view(6, -1).unbind()
    shape = (-1, 1) if dim == 1 else (-1,)
    if words.shape[dim] == 1:
        return torch.bitwise_right_shift(words, shifts.view(shape)).bitwise_and_(masks.view(shape))
    codes = words.index_select(dim, low).bitwise_right_shift_(shifts.view(shape)).bitwise_and_(masks.view(shape))
    rest = words.index_select(dim, high).bitwise_left_shift_(above.view(shape)).bitwise_and_(masks_above.view(shape))
    return codes.bitwise_or_(rest)


def take_apart(words: torch.Tensor, bits: int, *, interleaved: bool, dim: int) -> torch.Tensor:
    """Return the codes of ``words``, whose dimension ``dim`` has those numbers that make whole codes together."""
    return _apart(words, _places(bits, interleaved=interleaved), dim=dim)


def zeros_of(words: torch.Tensor, bits: int, *, interleaved: bool, less_one: bool) -> torch.Tensor:
    """Return the zeros (groups, …) of ``words`` [groups, numbers], as they are meant."""
    _, period = codes_together(bits)
    meant = words.view(len(words), -1, period) + _ones(bits, less_one=less_one)
    return take_apart(meant, bits, interleaved=interleaved, dim=2)


@cache
def _places(bits: int, *, interleaved: bool) -> torch.Tensor:
    """Return for each code the number with its low bits, their shift and mask, and the same of those in the next one.

    A mask drops what a shift brings of the sign.
    """
    each, period = codes_together(bits)
    order = [_ORDER.index(place) for place in range(8)] if interleaved else range(each)
    rows = []
    for place in order:
        word, shift = divmod(place * bits, 32)
        here = min(bits, 32 - shift)
        mask = (1 << here) - 1
        rows.append((word, shift, mask, min(word + 1, period - 1), here % 32, (1 << bits) - 1 - mask))
    return torch.tensor(rows, dtype=torch.int32).T.flatten()


@cache
def _ones(bits: int, *, less_one: bool) -> torch.Tensor:
    ones = np.array(_ONES[bits], np.uint32).view(np.int32)
    return torch.from_numpy(ones if less_one else np.zeros_like(ones))


def sample(name: str) -> tuple[PackedTensor, PackedBlock, list[Bytes]]:
    """Return a tensor of one block, that block and its bytes, made up: what the rate of ``name`` is measured by."""
    bits, outputs, inputs, group = int(name[-1]), 2048, 1024, 128
    codec = GroupedIntegers(name, bits, group, interleaved=name == "awq4")
    codes = (inputs, outputs * bits // 32) if codec.interleaved else (inputs * bits // 32, outputs)
    zeros = (inputs // group, outputs * bits // 32)
    every = [np.arange(math.prod(shape), dtype=np.uint32) * np.uint32(2654435761) for shape in (codes, zeros)]
    scales = np.full((inputs // group, outputs), 0.01, np.float16)
    file = ShardFile("sample", Path("sample"), 0, None, "")
    kinds = (("int32", codes), ("float16", scales.shape), ("int32", zeros))
    parts = tuple(Extent(file, 0, kind, shape) for kind, shape in kinds)
    tensor = PackedTensor(codec, parts, "bfloat16", (outputs, inputs))
    block = next(iter(codec.blocks(tensor)))
    return tensor, block, [part.view(np.uint8).ravel() for part in (every[0], scales, every[1])]
