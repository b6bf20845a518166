"""A strict reader of the head of a GGUF file, written from the format's description.

The format: the magic, a version, how many tensors and how many keys there are; the keys with their values; of each
tensor its name, sizes, type and offset; padding; then the tensors' bytes, each at a multiple of the alignment. Every
count is held against what the file has before anything is made from it. What the keys say beside the architecture is
transformers' to read. Needs no torch.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.codecs.ggml_formats import FORMATS
from offstage.stages.checkpoints.extents import MAX_ELEMENTS, Extent
from offstage.stages.checkpoints.safetensors_header import check_name
from offstage.stages.checkpoints.shard_files import ShardFile, check_regular, opened, read_at

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 1_000_000
MAX_ITEMS = 4_000_000
"""As many texts and numbers may stand in lists: a large vocabulary has a million, and each of them is looked at."""
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

_PIECE = 2**20
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""The bytes of a value by its type's number."""
_UINT16, _UINT32, _STRING, _ARRAY = 2, 4, 8, 9
_KINDS = {form.code: kind for kind, form in FORMATS.items()}
_REFUSED_KINDS = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 39: "MXFP4",
    40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""The names of types that a file may have and that aren't served."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file: its format's name, its shape as torch orders it, and its bytes (rows, bytes a row)."""

    kind: str
    shape: tuple[int, ...]
    extent: Extent


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What the head of a file says: ``file.digest`` is that of all its bytes."""

    file: ShardFile
    architecture: str
    tensors: Mapping[str, GgufTensor]
    has_tokenizer: bool


def read_gguf_header(path: Path) -> GgufHeader:
    """Return what the GGUF file ``path`` says of its tensors; a ``CheckpointError`` says what is wrong."""
    status = check_regular(path)
    return _read(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@lru_cache(maxsize=4)
def _read(path: Path, _size: int, _modified: int, _changed: int) -> GgufHeader:
    """Read the head of the file that ``path`` is now: it is asked for often, and has a whole vocabulary to skip."""
    with opened(path) as descriptor:
        status = os.fstat(descriptor)
        head = _Head(descriptor, path, status.st_size)
        tensor_count, key_count = _counts(head)
        keys = _keys(head, key_count)
        file = ShardFile(path.name, path, status.st_size, status.st_mtime_ns, "")
        tensors = _tensors(head, tensor_count, file)
    file = replace(file, digest=head.digest())
    alignment = _alignment(path, keys)
    start = math.ceil(head.at / alignment) * alignment
    placed = {name: _placed(tensor, file, start, alignment, name) for name, tensor in tensors.items()}
    _check_layout(file, placed)
    return GgufHeader(file, _architecture(path, keys), placed, has_tokenizer="tokenizer.ggml.model" in keys)


class _Head:
    """The first bytes of a file, read piece by piece as they are asked for, never beyond its end or the bound."""

    def __init__(self, descriptor: int, path: Path, size: int) -> None:
        self._descriptor, self.path, self._size = descriptor, path, size
        self._bytes = bytearray()
        self.at = 0
        self.items = 0

    def take(self, count: int, what: str) -> bytes:
        """Return the next ``count`` bytes, which are ``what``."""
        begin = self.skip(count, what)
        return bytes(memoryview(self._bytes)[begin : self.at])

    def skip(self, count: int, what: str) -> int:
        """Go on by ``count`` bytes, which are ``what``; return where they begin."""
        begin, end = self.at, self.at + count
        if end > self._size:
            raise CheckpointError(
                f"{self.path}: {what} would end at byte {end} of a file of {self._size}; truncated or damaged, get it "
                "again"
            )
        if end > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{self.path}: {what} would end at byte {end}; a header of at most {MAX_HEADER_BYTES} bytes is accepted"
            )
        while len(self._bytes) < end:
            self._read()
        self.at = end
        return begin

    def _read(self) -> None:
        begin = len(self._bytes)
        self._bytes += read_at(self._descriptor, begin, min(_PIECE, self._size - begin), self.path)

    def number(self, width: int, what: str) -> int:
        """Return the next number, without a sign, of ``width`` bytes."""
        begin = self.skip(width, what)
        return int.from_bytes(self._bytes[begin : self.at], "little")

    def text(self, what: str) -> str:
        """Return the next string: its length, then its UTF-8."""
        raw = self.take(self.number(8, f"the length of {what}"), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8; damaged, get it again") from error

    def digest(self) -> str:
        """Return the SHA-256 of all that was taken or skipped."""
        return hashlib.sha256(memoryview(self._bytes)[: self.at]).hexdigest()


def _counts(head: _Head) -> tuple[int, int]:
    """Return how many tensors and keys the file says that it has."""
    path = head.path
    if head.take(4, "the magic") != MAGIC:
        raise CheckpointError(f"{path}: doesn't begin with {MAGIC.decode()}: not a GGUF file, or damaged")
    raw = head.take(4, "the version")
    (version,), (swapped,) = struct.unpack("<I", raw), struct.unpack(">I", raw)
    if version not in VERSIONS:
        what = "big-endian, which isn't served" if swapped in VERSIONS else f"version {version} of GGUF"
        raise CheckpointError(f"{path}: {what}; served: versions {' and '.join(map(str, VERSIONS))}, little-endian")
    tensors, keys = head.number(8, "the count of tensors"), head.number(8, "the count of keys")
    for count, what in ((tensors, "tensors"), (keys, "keys")):
        if count > MAX_TENSORS:
            raise CheckpointError(f"{path}: says that it has {count} {what}; at most {MAX_TENSORS} are accepted")
    if not tensors:
        raise CheckpointError(f"{path}: holds no tensors")
    return tensors, keys


def _keys(head: _Head, count: int) -> dict[str, str | int | None]:
    """Return the keys and those of their values that are one text or one number."""
    keys: dict[str, str | int | None] = {}
    for _ in range(count):
        key = head.text("a key")
        if key in keys:
            raise CheckpointError(f"{head.path}: has the key {key[:80]!r} twice; get it again")
        keys[key] = _value(head, head.number(4, f"the type of {key[:80]!r}"), f"the value of {key[:80]!r}")
    return keys


def _value(head: _Head, kind: int, what: str) -> str | int | None:
    if kind == _STRING:
        return head.text(what)
    if kind in (_UINT16, _UINT32):
        return head.number(_WIDTHS[kind], what)
    if kind in _WIDTHS:
        head.skip(_WIDTHS[kind], what)
        return None
    if kind != _ARRAY:
        raise CheckpointError(f"{head.path}: {what} is of type {kind}, which GGUF doesn't have; damaged, get it again")
    element, length = head.number(4, what), head.number(8, what)
    head.items += length
    if head.items > MAX_ITEMS:
        raise CheckpointError(f"{head.path}: {what} is a list of {length}; lists of {MAX_ITEMS} in all are accepted")
    if element in _WIDTHS:
        head.skip(length * _WIDTHS[element], what)
    elif element == _STRING:
        for _ in range(length):
            head.skip(head.number(8, what), what)
    else:
        raise CheckpointError(f"{head.path}: {what} is a list of type {element}; served: numbers and texts")
    return None


def _alignment(path: Path, keys: Mapping[str, str | int | None]) -> int:
    """Return what the offsets of tensors are multiples of."""
    alignment = keys.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {str(alignment)[:40]}; a power of two belongs there")
    return alignment


def _architecture(path: Path, keys: Mapping[str, str | int | None]) -> str:
    parts = keys.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise CheckpointError(f"{path}: one of {parts} files; join them first (llama-gguf-split --merge)")
    architecture = keys.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise CheckpointError(f"{path}: says no general.architecture, so no model can be built from it")
    return architecture


def _tensors(head: _Head, count: int, file: ShardFile) -> dict[str, GgufTensor]:
    """Return what stands in the table of tensors; offsets are counted from where their data begin."""
    tensors: dict[str, GgufTensor] = {}
    for _ in range(count):
        name = head.text("a tensor's name")
        check_name(head.path, name)
        if name in tensors:
            raise CheckpointError(f"{head.path}: has the tensor {name!r} twice; get it again")
        tensors[name] = _tensor(head, file, name)
    return tensors


def _tensor(head: _Head, file: ShardFile, name: str) -> GgufTensor:
    where = f"tensor {name!r}"
    dimensions = head.number(4, f"the dimensions of {where}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise CheckpointError(f"{head.path}: {where} has {dimensions} dimensions; one to {MAX_DIMENSIONS} belong there")
    sizes = [head.number(8, f"the shape of {where}") for _ in range(dimensions)]
    code, offset = head.number(4, f"the type of {where}"), head.number(8, f"the offset of {where}")
    if not all(sizes) or math.prod(sizes) > MAX_ELEMENTS // 8:
        raise CheckpointError(f"{head.path}: {where}: shape {sizes} is that of no tensor; damaged, get it again")
    kind = _KINDS.get(code)
    if kind is None:
        served = ", ".join(name.upper() for name in FORMATS)
        raise CheckpointError(
            f"{head.path}: {where} is of type {_REFUSED_KINDS.get(code, code)}, which isn't served; served: {served}"
        )
    form = FORMATS[kind]
    if sizes[0] % form.elements:
        raise CheckpointError(
            f"{head.path}: {where}: rows of {sizes[0]} are no multiple of the {form.elements} in a block of {kind}"
        )
    shape = (math.prod(sizes[1:]), sizes[0] // form.elements * form.bytes)
    return GgufTensor(kind, tuple(reversed(sizes)), Extent(file, offset, "uint8", shape))


def _placed(tensor: GgufTensor, file: ShardFile, start: int, alignment: int, name: str) -> GgufTensor:
    """Return ``tensor`` with its place in the file, where the data begin at ``start``."""
    extent = tensor.extent
    if extent.begin % alignment:
        raise CheckpointError(
            f"{file.path}: tensor {name!r}: the offset {extent.begin} is no multiple of the alignment, {alignment}"
        )
    begin = start + extent.begin
    if begin + extent.bytes > file.size:
        raise CheckpointError(
            f"{file.path}: truncated: tensor {name!r} ends at byte {begin + extent.bytes} of a file of {file.size}; "
            "get it again"
        )
    return replace(tensor, extent=replace(extent, file=file, begin=begin))


def _check_layout(file: ShardFile, tensors: Mapping[str, GgufTensor]) -> None:
    """Refuse tensors that overlap."""
    spans = sorted((tensor.extent.begin, tensor.extent.end, name) for name, tensor in tensors.items())
    for (_, end, before), (begin, _, name) in itertools.pairwise(spans):
        if begin < end:
            raise CheckpointError(f"{file.path}: tensor {name!r} overlaps {before!r}")
