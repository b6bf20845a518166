"""Weights that rest packed, for tests: a small codec of every trait that one can have, and files of its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.device_codec import DeviceCodec, look_up
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import AtRest, PackedBlock, PackedTensor, in_memory
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine.aligned_memory import Bytes
from tests.stages.dispatch.placed_models import leave_empty, tensors_of

REFUSED = -128
"""A code that no tensor has: a file with one is damaged."""


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Codes of eight bits, with a float32 scale for each row at rest, which is a power of two.

    Where it is ``turned``, the last two dimensions are swapped at rest, so that a block goes to places all over its
    tensor. What isn't read ``alone`` has no rows. A block has ``block_rows`` rows at rest, all of one matrix.
    """

    turned: bool = False
    alone: bool = True
    block_rows: int = 7
    name: str = "scaled"
    dtypes: tuple[str, ...] = ("float32", "bfloat16")

    def at_rest(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return how many matrices a tensor of ``shape`` is, and what rows and columns one has at rest."""
        *stack, rows, columns = shape
        return math.prod(stack), *((columns, rows) if self.turned else (rows, columns))

    def blocks(self, tensor: PackedTensor) -> tuple[PackedBlock, ...]:
        count, rows, _ = self.at_rest(tensor.shape)
        edges = [
            (e * rows + begin, e * rows + min(rows, begin + self.block_rows))
            for e in range(count)
            for begin in range(0, rows, self.block_rows)
        ]
        return tuple(PackedBlock(self._spans(tensor, begin, end), begin, end) for begin, end in edges)

    def _spans(self, tensor: PackedTensor, begin: int, end: int) -> tuple[Extent, ...]:
        """Return rows at rest ``begin`` to ``end`` of the codes and of the scales."""
        width = self.at_rest(tensor.shape)[2]
        starts = [part.begin + begin * size for part, size in zip(tensor.parts, (width, 4), strict=True)]
        return tuple(
            Extent(part.file, start, "uint8", ((end - begin) * size,))
            for part, start, size in zip(tensor.parts, starts, (width, 4), strict=True)
        )

    def unpack(self, tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes) -> None:
        _, rows, width = self.at_rest(tensor.shape)
        codes = data[0].view(np.int8).reshape(-1, width)
        if (codes == REFUSED).any():
            raise CheckpointError(f"{tensor.file.path}: has a code that no tensor has; get it again")
        values = codes * data[1].view(np.float32)[:, None]
        words = values.view(np.uint32)
        if tensor.dtype == "bfloat16":
            words = (words >> 16).astype(np.uint16)
        place = target.view(words.dtype).reshape(-1, *tensor.shape[-2:])[block.begin // rows]
        within = slice(block.begin % rows, block.begin % rows + block.end - block.begin)
        if self.turned:
            place[:, within] = words.T
        else:
            place[within] = words

    def loop(self, tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes) -> None:
        """Return nothing: operators unpack."""

    def rows(self, tensor: PackedTensor, begin: int, end: int) -> PackedTensor | None:
        if not self.alone or (self.turned and len(tensor.shape) == 2):
            return None
        shape = (end - begin, *tensor.shape[1:])
        each = tensor.parts[1].bytes // 4 // tensor.shape[0]
        spans = self._spans(tensor, begin * each, end * each)
        return replace(tensor, parts=spans, shape=shape)


@dataclass(frozen=True, slots=True)
class TorchScaledRows(ScaledRows, DeviceCodec):
    """The same, which torch can unpack on any device."""

    def tables(self, tensor: PackedTensor) -> tuple[torch.Tensor, ...]:
        return (VALUES,)

    def scratch_bytes(self, tensor: PackedTensor, block: PackedBlock) -> int:
        return 12 * block.spans[0].bytes

    def unpack_on_device(
        self,
        tensor: PackedTensor,
        block: PackedBlock,
        data: Sequence[torch.Tensor],
        tables: Sequence[torch.Tensor],
        target: torch.Tensor,
    ) -> None:
        _, rows, width = self.at_rest(tensor.shape)
        values = look_up(tables[0], data[0]).view(-1, width) * data[1].view(torch.float32)[:, None]
        made = target.view(getattr(torch, tensor.dtype)).view(-1, *tensor.shape[-2:])[block.begin // rows]
        within = slice(block.begin % rows, block.begin % rows + block.end - block.begin)
        made = made[:, within].T if self.turned else made[within]
        made.copy_(values)


VALUES = torch.arange(256, dtype=torch.uint8).view(torch.int8).float()


def coded(tensor: torch.Tensor, codec: ScaledRows) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """Return the codes and scales of ``tensor`` (matrices), and what they unpack to, of its dtype."""
    values = tensor.detach().float()
    at_rest = (values.mT if codec.turned else values).contiguous()
    largest = at_rest.abs().amax(-1, keepdim=True).clamp(min=1e-20)
    scales = torch.exp2(torch.ceil(torch.log2(largest / 127)))
    codes = torch.round(at_rest / scales).clamp(-127, 127).to(torch.int8)
    unpacked = codes.float() * scales
    dequantised = (unpacked.mT if codec.turned else unpacked).contiguous().to(tensor.dtype)
    return codes.numpy(), scales.numpy(), dequantised


def quantised(model: nn.Module, codec: ScaledRows) -> nn.Module:
    """Return ``model`` with the values that its matrices have once they were packed."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_packed(name, parameter):
                parameter.copy_(coded(parameter, codec)[2])
    return model


def is_packed(name: str, tensor: torch.Tensor) -> bool:
    """Return whether a tensor of that name is one that rests packed: matrices do, the biases of experts don't."""
    return tensor.dim() > 1 and not name.endswith("bias")


class PackedFile:
    """A file of tensors: matrices packed by ``codec``, all else as it is."""

    def __init__(self, path: Path, codec: ScaledRows, *, begin: int = 24) -> None:
        self.codec, self._path, self._data = codec, path, bytearray(b"\0" * begin)
        self._places: dict[str, tuple[list[tuple[int, int]], str, tuple[int, ...]]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Put ``tensor`` into the file."""
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        if is_packed(name, tensor):
            parts = [part.tobytes() for part in coded(tensor, self.codec)[:2]]
        else:
            self._data += b"\0" * (-len(self._data) % 16)
            parts = [tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()]
        places = []
        for part in parts:
            places.append((len(self._data), len(part)))
            self._data += part
        self._places[name] = (places, dtype, shape)

    def write(self) -> dict[str, AtRest]:
        """Write the file, and return where each tensor lies."""
        self._path.write_bytes(self._data)
        status = self._path.stat()
        file = ShardFile(self._path.name, self._path, status.st_size, status.st_mtime_ns, "")
        at_rest: dict[str, AtRest] = {}
        for name, (places, dtype, shape) in self._places.items():
            if len(places) == 1:
                at_rest[name] = Extent(file, places[0][0], dtype, shape)
            else:
                parts = tuple(Extent(file, begin, "uint8", (size,)) for begin, size in places)
                at_rest[name] = PackedTensor(self.codec, parts, dtype, shape)
        return at_rest


def read_into_memory(tensor: PackedTensor) -> PackedTensor:
    """Return ``tensor`` with its parts in memory."""
    parts = [np.fromfile(part.file.path, np.uint8, part.bytes, offset=part.begin) for part in tensor.parts]
    return in_memory(tensor, parts)


def to_packed(codec: ScaledRows) -> Callable[[nn.Module, Collection[str], Path], dict[str, AtRest]]:
    """Return what does as ``to_disk`` of the placed models, and packs the matrices."""

    def to_disk(model: nn.Module, on_disk: Collection[str], path: Path, *, begin: int = 24) -> dict[str, AtRest]:
        tensors = tensors_of(model)
        file = PackedFile(path, codec, begin=begin)
        for name in sorted(on_disk):
            file.add(name, tensors[name])
        leave_empty(model, on_disk)
        return file.write()

    return to_disk
