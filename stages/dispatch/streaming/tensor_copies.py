"""Copies of tensors as they are before a call, by which they are put back after it.

Those of small ones are in memory. Those of large ones, which no plan counts, lie in a file without a name in the folder
for temporary files (``TMPDIR``), and are written again only where the tensor was, as far as torch counts.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch

from offstage.pipeline.errors import StorageError, words_of
from offstage.stages.dispatch.streaming.places import writes_to
from offstage.stages.plan.request.choose import COPIED_BYTES


@dataclass(slots=True, eq=False)
class _InFile:
    """A tensor whose bytes are at ``offset`` of the file, as they are after so many ``writes`` to it; null: not yet."""

    tensor: weakref.ref[torch.Tensor]
    offset: int
    writes: int | None = None


@dataclass(slots=True, weakref_slot=True, eq=False)
class LargeCopies:
    """Copies of tensors in one file, which takes its room on the disk for as long as this lives."""

    _file: int | None = None
    _kept: dict[int, _InFile] = field(default_factory=dict)
    _refusal: OSError | None = None

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have copies of ``tensors`` as they are now, and of no others.

        A disk that has no room for them matters only once one has to be put back.
        """
        copied = [entry.tensor() for entry in self._kept.values()]
        if len(copied) != len(tensors) or any(one is not other for one, other in zip(copied, tensors, strict=True)):
            offsets = accumulate((tensor.nbytes for tensor in tensors), initial=0)
            self._kept = {id(one): _InFile(weakref.ref(one), at) for one, at in zip(tensors, offsets, strict=False)}
        try:
            for tensor in tensors:
                copy = self._kept[id(tensor)]
                if copy.writes != writes_to(tensor) or tensor.is_inference():
                    self._write(tensor, copy)
        except OSError as error:
            self._refusal = error

    def put_back(self, tensor: torch.Tensor) -> None:
        """Have ``tensor`` be as it is in its copy. Raises ``StorageError`` where the disk had no room for one."""
        copy = self._kept[id(tensor)]
        try:
            if copy.writes is None and self._refusal is not None:
                raise self._refusal
            self._read(tensor, copy)
        except OSError as error:
            raise StorageError(
                f"{tempfile.gettempdir()}: the model's own code changes a buffer of {tensor.nbytes} bytes in place, "
                f"which is put back after each call from a copy there: {words_of(error)}; have TMPDIR name a folder "
                "with room for it"
            ) from error

    def _write(self, tensor: torch.Tensor, copy: _InFile) -> None:
        copy.writes = None
        if self._file is None:
            self._file, path = tempfile.mkstemp(prefix=".tmp-buffers-")
            weakref.finalize(self, os.close, self._file)
            Path(path).unlink()
        offset = copy.offset
        for piece in _pieces(tensor):
            data = memoryview(piece.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
            while data:
                done = os.pwrite(self._file, data, offset)
                data, offset = data[done:], offset + done
        copy.writes = writes_to(tensor)

    def _read(self, tensor: torch.Tensor, copy: _InFile) -> None:
        assert self._file is not None
        offset = copy.offset
        for piece in _pieces(tensor):
            data = bytearray(piece.nbytes)
            if os.preadv(self._file, [data], offset) < len(data):
                raise OSError("the file of copies ends early")
            write_into(piece, torch.frombuffer(data, dtype=piece.dtype).view(piece.shape))
            offset += len(data)
        copy.writes = writes_to(tensor)


def is_large(tensor: torch.Tensor) -> bool:
    """Return whether a copy of ``tensor`` doesn't go into memory."""
    plain = tensor.layout == torch.strided and not tensor.is_quantized
    return plain and tensor.nbytes > COPIED_BYTES


@torch.no_grad()
def write_into(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Have ``tensor`` have other ``values``."""
    with torch.inference_mode(tensor.is_inference()):
        tensor.copy_(values)


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield parts of ``tensor`` that are small enough for memory, in the order of a copy, however it lies."""
    tensor = tensor.detach()
    if tensor.nbytes <= COPIED_BYTES:
        yield tensor
        return
    for half in tensor.chunk(2, dim=max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])):
        yield from _pieces(half)
