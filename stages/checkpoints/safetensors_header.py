"""A strict reader of the safetensors header, written from the format's description.

The format: 8 bytes little-endian length, that many bytes of JSON (an object of tensor name → dtype, shape,
data_offsets; ``__metadata__`` of strings), then the tensors' bytes without overlap or gap. Every rule is
checked here before a byte of data is read, so that what comes later can trust each entry. Needs no torch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.extents import Extent, are_counts, is_shape
from offstage.stages.checkpoints.shard_files import ShardFile, is_plain_name, opened, read_at

DTYPES: Mapping[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32",
    "U32": "uint32", "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32",
    "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""The format's dtype codes and torch's names for them."""

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 1_000_000
MAX_NAME = 1024
"""The letters of a tensor's name: those of models have two hundred at most."""
PADDING_BYTES = 4096
"""Padding up to here is alignment; more, when it is also most of the header, is refused."""
_FIELDS = {"dtype", "shape", "data_offsets"}


ReadBytes = Callable[[int, int], bytes | bytearray]
"""Returns the bytes at an offset of a file, as many as are asked for."""


def read_header(path: Path) -> tuple[ShardFile, dict[str, Extent]]:
    """Return the safetensors file ``path`` and its tensors by name; a ``CheckpointError`` says what is wrong."""
    with opened(path) as descriptor:
        status = os.fstat(descriptor)
        raw = header_bytes(lambda offset, length: read_at(descriptor, offset, length, path), path, status.st_size)
    return parse_header(ShardFile(path.name, path, status.st_size, status.st_mtime_ns, ""), raw)


def parse_header(file: ShardFile, raw: bytes | bytearray) -> tuple[ShardFile, dict[str, Extent]]:
    """Return ``file`` with the digest of its header, which is ``raw``, and its tensors by name, all of it checked."""
    extents = _extents(file, _parse(file.path, raw), start=8 + len(raw))
    _check_layout(file, extents, start=8 + len(raw))
    hashed = replace(file, digest=hashlib.sha256(raw).hexdigest())
    return hashed, {name: replace(extent, file=hashed) for name, extent in extents.items()}


def check_name(path: Path, name: str) -> None:
    """Refuse a tensor name that is empty, without end, can't be a file's name, or isn't text."""
    if not is_plain_name(name) or len(name) > MAX_NAME:
        raise CheckpointError(
            f"{path}: tensor {name[:MAX_NAME]!r}: an empty name, one with NUL or a path in it, one that is not text or "
            f"has more than {MAX_NAME} letters, is refused"
        )


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return ``pairs`` of a JSON object as a dict; a ``ValueError`` names a key that stands there twice."""
    members = dict(pairs)
    if len(members) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"duplicate name {counts.most_common(1)[0][0]!r}")
    return members


def header_bytes(read: ReadBytes, path: Path, size: int) -> bytes | bytearray:
    """Return the header of the file ``path`` of ``size`` bytes, which ``read`` gives: eight bytes, then the header."""
    if size < 8:
        raise CheckpointError(f"{path}: {size} bytes are too few for a safetensors file; truncated?")
    prefix = read(0, 8)
    length = int.from_bytes(prefix, "little")
    if length > size - 8 and (prefix[:2] == b"PK" or prefix[:1] == b"\x80"):
        raise CheckpointError(f"{path}: a pickle, not a safetensors file; give it its own suffix, .bin")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: a header of {length} bytes; at most {MAX_HEADER_BYTES} are accepted")
    if length > size - 8:
        raise CheckpointError(f"{path}: a header of {length} bytes in a file of {size}; truncated, get it again")
    return read(8, length)


def _parse(path: Path, raw: bytes | bytearray) -> dict[str, Any]:
    padding = len(raw) - len(raw.rstrip())
    if padding >= PADDING_BYTES and padding > len(raw) // 2:
        raise CheckpointError(f"{path}: the header is mostly padding ({padding} of {len(raw)} bytes)")
    if raw[:1] != b"{":
        raise CheckpointError(f"{path}: the header is not a JSON object; is it a safetensors file?")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: the header is not UTF-8 (byte {error.start})") from error
    try:
        header = json.loads(text, object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON: {error}") from error
    _check_metadata(path, header.pop("__metadata__", {}))
    if len(header) > MAX_TENSORS:
        raise CheckpointError(f"{path}: {len(header)} tensors; at most {MAX_TENSORS} (a million) are accepted")
    return dict(header)


def _check_metadata(path: Path, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map strings to strings")


def _extents(file: ShardFile, header: Mapping[str, Any], *, start: int) -> dict[str, Extent]:
    if not header:
        raise CheckpointError(f"{file.path}: holds no tensors")
    return {name: _extent(file, name, fields, start=start) for name, fields in header.items()}


def _extent(file: ShardFile, name: str, fields: Any, *, start: int) -> Extent:
    check_name(file.path, name)
    where = f"{file.path}: tensor {name!r}"
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise CheckpointError(f"{where}: an entry has dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where}: unknown dtype {str(dtype)[:40]!r}; known: {', '.join(DTYPES)}")
    if not is_shape(shape):
        raise CheckpointError(f"{where}: shape {str(shape)[:80]} is not a list of sizes")
    if not are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{where}: data_offsets {str(offsets)[:80]}: two offsets that are not negative belong here"
        )
    begin, end = offsets
    if begin > end:
        raise CheckpointError(f"{where}: reversed offsets {begin}, {end}")
    extent = Extent(file, start + begin, DTYPES[dtype], tuple(shape))
    if extent.bytes != end - begin:
        raise CheckpointError(
            f"{where}: shape {shape} of {dtype} is {extent.bytes} bytes, its offsets span {end - begin}"
        )
    return extent


def _check_layout(file: ShardFile, extents: Mapping[str, Extent], *, start: int) -> None:
    """Refuse overlaps, gaps, and data that ends before or after the file does."""
    path, size = file.path, file.size
    spans = sorted((extent.begin, extent.end, name) for name, extent in extents.items())
    header = (start, start, "the header")
    for (_, end, before), (begin, _, name) in itertools.pairwise([header, *spans]):
        if begin < end:
            raise CheckpointError(f"{path}: tensor {name!r} overlaps {before!r}")
        if begin > end:
            raise CheckpointError(f"{path}: a gap of {begin - end} bytes before tensor {name!r}")
    _, end, last = spans[-1]
    if end > size:
        raise CheckpointError(
            f"{path}: truncated: tensor {last!r} ends at byte {end} of a file of {size}; get it again"
        )
    if end < size:
        raise CheckpointError(f"{path}: {size - end} bytes after the last tensor, {last!r}, belong to none")
