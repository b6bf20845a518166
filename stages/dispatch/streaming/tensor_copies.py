"""Copies of tensors as they are before a call, by which they are put back after it.

Those of small ones are in memory. Those of large ones, which no plan counts, lie in a file without a name in the folder
for temporary files (``TMPDIR``), mapped, and are written again only where the tensor was, as far as torch counts.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from offstage.pipeline.errors import StorageError, words_of
from offstage.stages.dispatch.streaming.places import writes_to
from offstage.stages.machine.aligned_memory import TENSOR_ALIGNMENT, align_up, tensor_in
from offstage.stages.plan.request.choose import COPIED_BYTES


@dataclass(slots=True, eq=False)
class _Copied:
    """A tensor and its ``copy`` in the file, as it is after so many ``writes`` to the tensor; null: not yet."""

    tensor: weakref.ref[torch.Tensor]
    copy: torch.Tensor
    writes: int | None = None


@dataclass(slots=True, eq=False)
class LargeCopies:
    """Copies of tensors in one file, which takes its room on the disk for as long as this lives."""

    _kept: dict[int, _Copied] = field(default_factory=dict)
    _refusal: OSError | None = None

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have copies of ``tensors`` as they are now, and of no others.

        A disk that has no room for them matters only once one has to be put back.
        """
        copied = [entry.tensor() for entry in self._kept.values()]
        if len(copied) != len(tensors) or any(one is not other for one, other in zip(copied, tensors, strict=True)):
            self._kept, self._refusal = {}, None
            try:
                self._kept = _in_file(tensors)
            except OSError as error:
                self._refusal = error
        for entry, tensor in zip(self._kept.values(), tensors, strict=False):
            if entry.writes != writes_to(tensor) or tensor.is_inference():
                write_into(entry.copy, tensor.detach())
                entry.writes = writes_to(tensor)

    def put_back(self, tensor: torch.Tensor) -> None:
        """Have ``tensor`` be as it is in its copy. Raises ``StorageError`` where the disk had no room for one."""
        if self._refusal is not None:
            raise StorageError(
                f"{tempfile.gettempdir()}: the model's own code changes a buffer of {tensor.nbytes} bytes in place, "
                f"which is put back after each call from a copy there: {words_of(self._refusal)}; have TMPDIR name a "
                "folder with room for it"
            ) from self._refusal
        entry = self._kept[id(tensor)]
        write_into(tensor, entry.copy)
        entry.writes = writes_to(tensor)


def _in_file(tensors: Sequence[torch.Tensor]) -> dict[int, _Copied]:
    """Return room for a copy of each of ``tensors``; an ``OSError`` where the disk has none for all of them."""
    if not tensors:
        return {}
    sizes = (align_up(tensor.nbytes, TENSOR_ALIGNMENT) for tensor in tensors)
    *begins, size = accumulate(sizes, initial=0)
    with tempfile.TemporaryFile(prefix=".tmp-buffers-") as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a page that found no room later would end the process
        memory = mmap.mmap(file.fileno(), size)
    return {
        id(tensor): _Copied(weakref.ref(tensor), tensor_in(memory, begin, tensor.dtype, tuple(tensor.shape)))
        for tensor, begin in zip(tensors, begins, strict=True)
    }


def is_large(tensor: torch.Tensor) -> bool:
    """Return whether a copy of ``tensor`` doesn't go into memory."""
    plain = tensor.layout == torch.strided and not tensor.is_quantized
    return plain and tensor.nbytes > COPIED_BYTES


@torch.no_grad()
def write_into(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Have ``tensor`` have other ``values``."""
    with torch.inference_mode(tensor.is_inference()):
        tensor.copy_(values)
