"""Reading packed tensors whole, in the thread that asks."""

from __future__ import annotations

import numpy as np
import torch

from stages.checkpoints.dtypes import torch_dtype
from stages.checkpoints.extents import Extent
from stages.checkpoints.packed import PackedTensor
from stages.checkpoints.shard_files import opened_shard, read_into
from stages.machine.aligned_memory import Bytes, byte_view, room_for


def read_packed(tensor: PackedTensor) -> torch.Tensor:
    """Return ``tensor`` as it is used, on the cpu, in new memory; read and unpacked block by block."""
    made = room_for(tensor.shape, torch_dtype(tensor.dtype)).tensor
    if made.numel():
        fill_packed(tensor, made)
    return made


def fill_packed(tensor: PackedTensor, target: torch.Tensor) -> None:
    """Read and unpack ``tensor`` into ``target``: contiguous, on the cpu, of its dtype and shape, not empty."""
    place = np.frombuffer(byte_view(target), np.uint8)
    for block in tensor.codec.blocks(tensor):
        tensor.codec.unpack(tensor, block, [_read(span) for span in block.spans], place)


def _read(span: Extent) -> Bytes:
    data = np.empty(span.bytes, np.uint8)
    with opened_shard(span.file) as descriptor:
        read_into(descriptor, data.data, offset=span.begin, path=span.file.path)
    return data
