"""Unpacking by torch's operators, on any device, and what that takes there.

Packed bytes are fewer, and a link is slower than an accelerator's memory: so accelerators unpack themselves. The host
does it by the same operators, tile by tile, where no loop is compiled for it. They work on integers and tables, a
product or a sum at a time, so that every device has the same bits. What is no number stays none; which of the many it
is, is each device's own.
"""

from __future__ import annotations

import ctypes
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import torch

from offstage.stages.checkpoints.packed import PackedBlock, PackedTensor
from offstage.stages.machine.aligned_memory import Bytes, align_up
from offstage.stages.machine.operator_threads import alone, elements_alone
from offstage.stages.units import DEVICE_ALIGNMENT

LANDINGS = 2
"""Blocks that have room at rest on an accelerator: one comes over the link while another one is unpacked."""

_OPERANDS = 16
"""Temporaries of a block at once, at the most: each may be rounded up to the alignment."""


TILE = elements_alone(2**17)
"""How many values the host unpacks at once: few enough for a core's cache, so many that threads seldom want Python's
lock, and that what calls take is little beside them.
"""


class DeviceCodec(ABC):
    """A codec whose tensors torch unpacks, on any device that is ``portable``."""

    __slots__ = ()

    @property
    def portable(self) -> bool:
        """Whether accelerators can do it too."""
        return True

    def unpack(self, tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes) -> None:
        """Unpack on the host, in this thread alone: see ``Codec``."""
        parts = [torch.frombuffer(_writable(part), dtype=torch.uint8) for part in data]
        with alone():
            self.unpack_on_device(tensor, block, parts, self.tables(tensor), torch.from_numpy(target))

    @abstractmethod
    def tables(self, tensor: PackedTensor) -> tuple[torch.Tensor, ...]:
        """Return what is looked up while ``tensor`` is unpacked: on the host, the same objects at each call."""

    @abstractmethod
    def scratch_bytes(self, tensor: PackedTensor, block: PackedBlock) -> int:
        """Return what unpacking ``block`` takes on the device at most, beside what it is given and what comes of it."""

    @abstractmethod
    def unpack_on_device(
        self,
        tensor: PackedTensor,
        block: PackedBlock,
        data: Sequence[torch.Tensor],
        tables: Sequence[torch.Tensor],
        target: torch.Tensor,
    ) -> None:
        """Write what comes of ``block`` to its place in ``target``, the bytes of the whole tensor in use.

        ``data`` has the bytes of the block's spans, each aligned; ``tables`` are those of the codec. All lie on the
        device, and nothing here waits for it. The bits are the same everywhere, but for what is no number.
        """


def can_unpack(tensor: PackedTensor) -> bool:
    """Return whether ``tensor`` can be unpacked on a device, and has anything in it."""
    return tensor.bytes > 0 and isinstance(tensor.codec, DeviceCodec) and tensor.codec.portable


def landing_bytes(block: PackedBlock) -> int:
    """Return the device memory that ``block`` lies in at rest."""
    return sum(align_up(span.bytes, DEVICE_ALIGNMENT) for span in block.spans)


def device_bytes(tensors: Iterable[PackedTensor]) -> int:
    """Return the device memory by which those of ``tensors`` are unpacked there that can be, beside the tensors."""
    return sum(device_parts(tensors))


def device_parts(tensors: Iterable[PackedTensor]) -> tuple[int, int, int]:
    """Return what of that is for blocks at rest, for the operators' temporaries, and for tables."""
    landing = scratch = 0
    tables: dict[int, int] = {}
    for tensor in filter(can_unpack, tensors):
        if isinstance(tensor.codec, DeviceCodec):
            tables |= {id(table): align_up(table.nbytes, DEVICE_ALIGNMENT) for table in tensor.codec.tables(tensor)}
            for block in tensor.codec.blocks(tensor):
                landing = max(landing, landing_bytes(block))
                scratch = max(scratch, block_scratch(tensor.codec, tensor, block))
    return LANDINGS * landing, scratch, sum(tables.values())


def block_scratch(codec: DeviceCodec, tensor: PackedTensor, block: PackedBlock) -> int:
    """Return what the temporaries of ``block`` take on the device, each rounded up to the alignment."""
    return codec.scratch_bytes(tensor, block) + _OPERANDS * DEVICE_ALIGNMENT


def moved_bytes(tensor: PackedTensor) -> int:
    """Return what unpacking ``tensor`` on a device reads and writes there: at rest, in use, and temporaries twice."""
    codec = tensor.codec
    assert isinstance(codec, DeviceCodec)
    blocks = tensor.codec.blocks(tensor)
    return tensor.bytes + sum(block.bytes + 2 * codec.scratch_bytes(tensor, block) for block in blocks)


def look_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return what ``table`` has for each of ``codes`` (bytes), flat."""
    return table.index_select(0, codes.reshape(-1).to(torch.int32))


def most_at_once(target: torch.Tensor) -> int:
    """Return how many values are unpacked at once where ``target`` lies: on an accelerator, whole blocks."""
    return TILE if target.is_cpu else sys.maxsize


def tiles(rows: int, columns: int, *, most: int, height: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns that are unpacked together, of at most so many values: many whole rows, or a piece of one.

    Where there is room for more than one, rows come by multiples of ``height``, and columns of ``width``.
    """
    wide = columns if columns <= most else max(1, most // width) * width
    tall = max(1, most // wide)
    tall -= tall % height if tall > height else 0
    for top in range(0, rows, tall):
        for left in range(0, columns, wide):
            yield slice(top, min(top + tall, rows)), slice(left, min(left + wide, columns))


def _writable(part: Bytes) -> ctypes.Array[ctypes.c_uint8]:
    """Return the memory of ``part`` as what torch takes: no tensor can say that it is only to be read."""
    return (ctypes.c_uint8 * part.nbytes).from_address(part.ctypes.data)
