"""Weights of four bits whose values a table has, each run of them with a scale: NF4 and FP4 of bitsandbytes.

What comes out is ``(value as float32 * scale as float32)`` rounded to the dtype in use, as the library's own kernel for
the cpu gives it. Scales may be codes themselves: of a table, with a scale for each run and an offset for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from offstage.stages.checkpoints.codecs.loops import Loop, loops
from offstage.stages.checkpoints.device_codec import look_up
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import BLOCK_BYTES, PackedBlock, PackedTensor
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine.aligned_memory import Bytes
from offstage.stages.machine.operator_threads import alone, elements_alone
from offstage.stages.units import DTYPE_BYTES

NAME = "nf4"
RUNS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""How many values may share a scale."""

_TILE = elements_alone(2**17)
"""How many values are unpacked at once: few enough for a core's cache, so many that threads seldom want Python's lock.
"""


@dataclass(frozen=True, slots=True)
class PackedScales:
    """Scales that are codes: the 256 values that these stand for, how many share a scale, what is added to all."""

    values: tuple[float, ...]
    run: int
    offset: float


@dataclass(frozen=True, slots=True)
class TableScaled:
    """Values of a table of 16, two to a byte, the upper four bits first; a scale for each ``run`` of them.

    A tensor's parts are its codes, its scales, and where these are packed their own scales. Blocks are counted in runs.
    """

    values: tuple[float, ...]
    run: int
    scales: PackedScales | None
    dtypes: tuple[str, ...]
    name: str = NAME

    def blocks(self, tensor: PackedTensor) -> tuple[PackedBlock, ...]:
        """Return the runs of ``tensor``, as many at a time as a block may have."""
        runs = math.prod(tensor.shape) // self.run
        step = max(1, BLOCK_BYTES // int(self.run * DTYPE_BYTES[tensor.dtype]))
        cuts = pairwise((*range(0, runs, step), runs)) if runs else ()
        return tuple(PackedBlock(self._spans(tensor, begin, end), begin, end) for begin, end in cuts)

    def _spans(self, tensor: PackedTensor, begin: int, end: int) -> tuple[Extent, ...]:
        return tuple(part.as_bytes for part in self._parts(tensor, begin, end))

    def unpack(self, tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes) -> None:
        """Write the runs of ``block`` to their place in ``target``."""
        scales = self._scales(block, data)
        loop = self._loop(tensor, block, (data[0], scales.view(np.uint8)), target)
        if loop is not None:
            loop.run()
        else:
            codes, made = data[0].reshape(-1, self.run // 2), self._made(tensor, block, target)
            self._unpack_by_operators(codes, scales, torch.from_numpy(made).view(torch_dtype(tensor.dtype)))

    def loop(self, tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes) -> Loop | None:
        """Return what unpacks ``block`` at once; null where its scales must be made numbers first."""
        return self._loop(tensor, block, data, target) if self.scales is None else None

    def _loop(self, tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes) -> Loop | None:
        known = loops()
        if known is None or not known.has_dtype(tensor.dtype):
            return None
        (codes, scales), made = data, self._made(tensor, block, target)
        return known.table_scaled(
            codes.reshape(-1, self.run // 2), _pairs(self.values), scales, made, dtype=tensor.dtype
        )

    def _made(self, tensor: PackedTensor, block: PackedBlock, target: Bytes) -> Bytes:
        """Return the place of the runs of ``block`` in ``target``."""
        return target.reshape(-1, int(self.run * DTYPE_BYTES[tensor.dtype]))[block.begin : block.end]

    def _unpack_by_operators(self, codes: Bytes, factors: npt.NDArray[np.float32], made: torch.Tensor) -> None:
        pairs, scales = _pairs(self.values), torch.from_numpy(factors)[:, None]
        floats = np.empty((min(len(codes), max(1, _TILE // self.run)), self.run), np.float32)
        with alone():
            for begin in range(0, len(codes), len(floats)):
                some = slice(begin, begin + len(floats))
                values = floats[: len(codes[some])]
                np.take(pairs, codes[some], out=values.view(pairs.dtype), mode="clip")
                made[some].copy_(torch.from_numpy(values).mul_(scales[some]))

    def tables(self, tensor: PackedTensor) -> tuple[torch.Tensor, ...]:
        """Return the two values of each byte, as one number, and those that packed scales are codes of."""
        return (_device_pairs(self.values), *((_device_scales(self.scales.values),) if self.scales else ()))

    def scratch_bytes(self, tensor: PackedTensor, block: PackedBlock) -> int:
        """Return what the codes as indices, their values as float32, and the scales with their own ones take."""
        return 12 * block.spans[0].bytes + 24 * (block.end - block.begin)

    def unpack_on_device(
        self,
        tensor: PackedTensor,
        block: PackedBlock,
        data: Sequence[torch.Tensor],
        tables: Sequence[torch.Tensor],
        target: torch.Tensor,
    ) -> None:
        """Write the runs of ``block`` to their place in ``target``."""
        if self.scales is None:
            scales = data[1].view(torch.float32)
        else:
            runs = torch.arange(block.begin, block.end, dtype=torch.int32, device=target.device)
            runs = runs.floor_divide_(self.scales.run).sub_(block.begin // self.scales.run)
            scales = look_up(tables[1], data[1]).mul_(data[2].view(torch.float32).index_select(0, runs))
            scales.add_(self.scales.offset)
        values = look_up(tables[0], data[0]).view(torch.float32).view(-1, self.run)
        made = target.view(torch_dtype(tensor.dtype)).view(-1, self.run)[block.begin : block.end]
        torch.mul(values, scales[:, None], out=made)

    def rows(self, tensor: PackedTensor, begin: int, end: int) -> PackedTensor | None:
        """Return rows ``begin`` to ``end``; null where they, or the scales of theirs, aren't whole runs."""
        width = math.prod(tensor.shape[1:])
        first, last = begin * width // self.run, end * width // self.run
        if begin * width % self.run or end * width % self.run or (self.scales and first % self.scales.run):
            return None
        shape = (end - begin, *tensor.shape[1:])
        return replace(tensor, parts=self._parts(tensor, first, last), shape=shape)

    def _parts(self, tensor: PackedTensor, begin: int, end: int) -> tuple[Extent, ...]:
        """Return where the codes and scales of runs ``begin`` to ``end`` lie."""
        codes, scales, *above = tensor.parts
        found = [codes.flat.rows(begin * self.run // 2, end * self.run // 2), scales.flat.rows(begin, end)]
        if self.scales:
            run = self.scales.run
            found += [part.flat.rows(begin // run, -(-end // run)) for part in above]
        return tuple(found)

    def _scales(self, block: PackedBlock, data: Sequence[Bytes]) -> npt.NDArray[np.float32]:
        """Return the scales of ``block`` as numbers."""
        if self.scales is None:
            return data[1].view(np.float32).copy()  # where it was read to, it may begin at any byte
        which = np.arange(block.begin, block.end) // self.scales.run - block.begin // self.scales.run
        found = np.array(self.scales.values, np.float32)[data[1]] * data[2].view(np.float32)[which]
        found += np.float32(self.scales.offset)
        return found


@lru_cache
def _pairs(values: tuple[float, ...]) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Return the two values of each byte, the upper four bits first, as one number."""
    known = np.array(values, np.float32)
    return np.stack([np.repeat(known, 16), np.tile(known, 16)], axis=1).view(np.uint64).ravel()


@lru_cache
def _device_pairs(values: tuple[float, ...]) -> torch.Tensor:
    return torch.from_numpy(_pairs(values).view(np.int64))


@lru_cache
def _device_scales(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def sample() -> tuple[PackedTensor, PackedBlock, list[Bytes]]:
    """Return a tensor of one block, that block and its bytes, made up: what its rate is measured by."""
    count, run = 2**21, 64
    random = np.random.default_rng(0)
    codes = random.integers(256, size=count // 2, dtype=np.uint8)
    scales = random.integers(256, size=count // run, dtype=np.uint8)
    above = np.full(count // run // 256, 0.01, np.float32)
    file = ShardFile("sample", Path("sample"), 0, None, "")
    parts = tuple(Extent(file, 0, str(part.dtype), part.shape) for part in (codes, scales, above))
    packed = PackedScales(tuple(map(float, np.linspace(-1, 1, 256, dtype=np.float32))), 256, 0.05)
    codec = TableScaled(tuple(map(float, np.linspace(-1, 1, 16, dtype=np.float32))), run, packed, ("bfloat16",))
    tensor = PackedTensor(codec, parts, "bfloat16", (1024, count // 1024))
    (block,) = codec.blocks(tensor)
    return tensor, block, [codes, scales, above.view(np.uint8)]
