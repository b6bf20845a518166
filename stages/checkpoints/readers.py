"""Reading tensors from a checkpoint's files into memory that torch owns.

Safetensors are read with ``preadv`` straight into the tensor's own memory: no memory map, so no page faults
at use and no second copy of the weights besides the page cache. ``.bin`` goes through ``torch.load`` with
``weights_only``, which runs no code of the file's, memory-mapped where the file is a zip.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from offstage.pipeline.errors import CheckpointError, apart
from offstage.pipeline.regular_files import open_regular, read_json
from offstage.stages.checkpoints.checkpoint import ZIP_MAGIC, Checkpoint, FileHeader, check_index, join_headers
from offstage.stages.checkpoints.codecs.ggml_formats import FORMATS, PLAIN
from offstage.stages.checkpoints.codecs.gguf import AS_THEY_ARE, Arrangement, GgufCodec
from offstage.stages.checkpoints.dtypes import dtype_name, torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from offstage.stages.checkpoints.gguf_model import NAMES, gguf_folder
from offstage.stages.checkpoints.gguf_names import NamedTensor
from offstage.stages.checkpoints.packed import AtRest, PackedTensor, in_dtype
from offstage.stages.checkpoints.packed_reads import bytes_at, read_span, unpack_block
from offstage.stages.checkpoints.quantised import logical_entries
from offstage.stages.checkpoints.quantization import SERVED, method_of, quantization_of
from offstage.stages.checkpoints.safetensors_header import check_name
from offstage.stages.checkpoints.shard_files import ShardFile, opened_shard, read_at
from offstage.stages.machine.aligned_memory import byte_view, room_for

_LOAD_FAILURES = (
    RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError, EOFError, OverflowError,
    AssertionError, ImportError, MemoryError, pickle.PickleError, struct.error,
)  # fmt: skip
"""What ``torch.load`` is seen to raise for files that are damaged or made to harm."""


_PICKLES = 5
_COUNT_BYTES = 8
"""Before each storage stands how many elements it has."""


class SourceReader(Protocol):
    """Reads a checkpoint's tensors by the checkpoint's own names."""

    @property
    def entries(self) -> Mapping[str, AtRest]:
        """Every tensor of the checkpoint."""

    def borrow(self, name: str) -> torch.Tensor:
        """Return the tensor as the checkpoint has it, to be read only: it may be a view of a mapped file."""

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor in ``dtype``, in memory of its own."""

    def fill(self, name: str, target: torch.Tensor) -> None:
        """Copy the tensor into ``target``, a view of the same shape, cast to its dtype."""

    def release(self) -> None:
        """Let go of whatever is held of the files; reading goes on where it is asked for."""


def open_reader(checkpoint: Checkpoint) -> SourceReader:
    """Return what reads the checkpoint's tensors as a model uses them, in whatever they rest."""
    if checkpoint.copy is not None:
        return SafetensorsReader(checkpoint.copy.entries)
    if checkpoint.format == "gguf":
        return SafetensorsReader(gguf_entries(checkpoint.files[0].path))
    quantization = quantization_of(checkpoint.folder)
    if checkpoint.format == "safetensors":
        return SafetensorsReader(logical_entries(checkpoint.entries, quantization))
    if method_of(quantization) in SERVED:
        raise CheckpointError(
            f"{checkpoint.path}: weights quantised by {method_of(quantization)!r} are served of safetensors alone; "
            "save the checkpoint again as safetensors"
        )
    return PickleReader(checkpoint)


def open_stored_reader(checkpoint: Checkpoint) -> SourceReader:
    """Return what reads the checkpoint's tensors as its files have them: scales are tensors beside the codes."""
    if checkpoint.format == "gguf":
        return open_reader(checkpoint)
    return SafetensorsReader(checkpoint.stored) if checkpoint.tells_places else PickleReader(checkpoint)


class SafetensorsReader:
    """Reads tensors that are extents of files: of safetensors, and of GGUF."""

    def __init__(self, entries: Mapping[str, AtRest]) -> None:
        self.entries = entries

    def borrow(self, name: str) -> torch.Tensor:
        """Return the tensor as the checkpoint has it."""
        return read_extent(self.entries[name])

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor in ``dtype``: what is packed is unpacked to it where its codec can."""
        source = in_dtype(self.entries[name], dtype_name(dtype)) or self.entries[name]
        return read_extent(source).to(dtype)

    def fill(self, name: str, target: torch.Tensor) -> None:
        """Copy the tensor into ``target``: straight from the file where it is contiguous and of the same dtype."""
        source = in_dtype(self.entries[name], dtype_name(target.dtype))
        if target.is_contiguous() and source is not None:
            fill_from(source, target)
        else:
            target.copy_(read_extent(source or self.entries[name]))

    def release(self) -> None:
        """Do nothing: no file is held."""


class PickleReader:
    """Reads tensors of ``.bin`` files, holding one file at a time.

    A zip is memory-mapped: only the pages of the tensors that are read come in. A pickle from before torch
    1.6 has to be loaded whole.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._held: tuple[ShardFile | None, Mapping[str, torch.Tensor]] = (None, {})
        self.entries: Mapping[str, AtRest] = self._scan()

    def borrow(self, name: str) -> torch.Tensor:
        """Return the tensor as a view of its file."""
        return self._shard(self.entries[name].file)[name]

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor in ``dtype``, contiguous, in memory of its own."""
        return self.borrow(name).to(dtype, copy=True, memory_format=torch.contiguous_format)

    def fill(self, name: str, target: torch.Tensor) -> None:
        """Copy the tensor into ``target``."""
        target.copy_(self.borrow(name))

    def release(self) -> None:
        """Let go of the file that was read last."""
        self._held = (None, {})

    def _shard(self, file: ShardFile) -> Mapping[str, torch.Tensor]:
        if self._held[0] != file:
            self.release()  # the old file goes before the new one comes
            self._held = (file, load_pickle(file))
        return self._held[1]

    def _header(self, file: ShardFile) -> FileHeader:
        tensors = self._shard(file).items()
        return file, {name: Extent(file, 0, dtype_name(one.dtype), tuple(one.shape)) for name, one in tensors}

    def _scan(self) -> dict[str, Extent]:
        _, entries = join_headers(map(self._header, self._checkpoint.files))
        if self._checkpoint.weight_map is not None:
            check_index(self._checkpoint, entries)
        return entries


def read_extent(extent: AtRest) -> torch.Tensor:
    """Return the tensor that lies at ``extent``, on the cpu, in new memory; one that is packed is unpacked."""
    dtype = torch_dtype(extent.dtype)
    is_packed = isinstance(extent, PackedTensor)
    tensor = room_for(extent.shape, dtype).tensor if is_packed else torch.empty(extent.shape, dtype=dtype)
    fill_from(extent, tensor)
    return tensor


def fill_from(extent: AtRest, tensor: torch.Tensor) -> None:
    """Read what lies at ``extent`` into ``tensor``, in this thread: contiguous, on the cpu, of its dtype and shape."""
    if not tensor.numel():
        return
    if isinstance(extent, PackedTensor):
        place = np.frombuffer(byte_view(tensor), np.uint8)
        for block in extent.codec.blocks(extent):
            unpack_block(extent, block, [bytes_at(span) for span in block.spans], place)
    else:
        read_span(extent, byte_view(tensor))


def load_pickle(file: ShardFile) -> dict[str, torch.Tensor]:
    """Return the tensors of the ``.bin`` file ``file`` by name, without running any code of its own.

    A ``CheckpointError`` names the file where it is damaged, needs code to run, or holds anything but
    tensors.
    """
    with opened_shard(file) as descriptor:
        magic = read_at(descriptor, 0, min(4, file.size), file.path)
    with _load_errors(file.path):
        data = torch.load(file.path, map_location="cpu", weights_only=True, mmap=magic == ZIP_MAGIC)
    if not isinstance(data, dict) or not data:
        raise CheckpointError(f"{file.path}: holds {type(data).__name__}, not tensors by name")
    for name, tensor in data.items():
        _check_tensor(file.path, name, tensor)
    if magic != ZIP_MAGIC:
        with _load_errors(file.path):
            _check_storages(file.path, data.values())
    return dict(data)


def _check_tensor(path: Path, name: object, tensor: object) -> None:
    if not isinstance(name, str):
        raise CheckpointError(f"{path}: {str(name)[:40]!r} is not a tensor's name")
    check_name(path, name)
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(f"{path}: {name!r} is {type(tensor).__name__}, not a plain tensor")


@contextmanager
def _load_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: not a file of tensors alone: it needs code to run, or is damaged; "
            "save the model again as safetensors"
        ) from apart(error)
    except _LOAD_FAILURES as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path}: can't be loaded, get it again: {reason}") from apart(error)


def _check_storages(path: Path, tensors: Iterable[torch.Tensor]) -> None:
    """Raise a ``CheckpointError`` where ``tensors``, loaded from ``path``, have other bytes than were stored there.

    Files of torch before 1.6 are five pickles one after another, the last a list of keys, and then the storages.
    ``torch.load`` makes room for every storage that a tensor refers to, and fills those that the list of keys names.
    One flipped bit in a key leaves a storage as the memory was: a tensor of whatever stood there before.
    """
    storages = [tensor.untyped_storage() for tensor in tensors]
    needed = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    with os.fdopen(open_regular(path), "rb") as file:
        keys = 0
        for _ in range(_PICKLES):
            keys = sum(isinstance(argument, str) for _, argument, _ in pickletools.genops(file))
        stored = os.fstat(file.fileno()).st_size - file.tell() - _COUNT_BYTES * keys
    if needed != stored:
        raise CheckpointError(
            f"{path}: its tensors have {needed} bytes, and {stored} are stored there; get the file again"
        )


def gguf_entries(path: Path) -> Mapping[str, AtRest]:
    """Return the tensors of the model that the GGUF file ``path`` holds, by their names in the model."""
    header, folder = read_gguf_header(path), gguf_folder(path)
    fields_of = read_json(folder / NAMES)
    return {name: _entry(header, _named(fields)) for name, fields in fields_of.items()}


def _named(fields: Mapping[str, Any]) -> NamedTensor:
    swapped = fields["arrangement"]["swapped"]
    arrangement = Arrangement(**{**fields["arrangement"], "swapped": None if swapped is None else tuple(swapped)})
    return NamedTensor(tuple(fields["shape"]), tuple(fields["sources"]), arrangement)


def _entry(header: GgufHeader, named: NamedTensor) -> AtRest:
    """Return what the tensor ``named`` rests in; plain values in the model's own order are it, in their own dtype."""
    sources = [header.tensors[name] for name in named.sources]
    kinds = tuple(source.kind for source in sources)
    parts = tuple(_part(source, named) for source in sources)
    if kinds[0] in PLAIN and len(kinds) == 1 and named.arrangement == AS_THEY_ARE:
        parts = (replace(parts[0], dtype=PLAIN[kinds[0]], shape=named.shape),)
    return PackedTensor(GgufCodec(kinds, named.arrangement), parts, "float32", named.shape)


def _part(tensor: GgufTensor, named: NamedTensor) -> Extent:
    """Return the extent of ``tensor``: rows of blocks, of a stack those of each matrix, of a vector whose elements
    change places one element each.
    """
    if len(tensor.shape) == len(named.shape) == 3 and tensor.shape[0] == named.shape[0]:
        return replace(tensor.extent, shape=(*tensor.shape[:2], tensor.extent.shape[-1]))
    by_element = named.arrangement.swapped is not None and len(tensor.shape) == 1
    shape = (tensor.shape[0], FORMATS[tensor.kind].bytes)
    return replace(tensor.extent, shape=shape) if by_element else tensor.extent
