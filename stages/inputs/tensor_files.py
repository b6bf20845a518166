"""Named tensors from a ``.safetensors`` or ``.npz`` file: what a forward is called with, given as it is.

Such a file may come from a stranger. What it declares is held against its size before anything is allocated, and no
pickle in it is ever loaded.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from offstage.pipeline.errors import CheckpointError, ConfigError, apart, foreign
from offstage.pipeline.regular_files import open_regular
from offstage.stages.checkpoints.safetensors_header import DTYPES, read_header

if TYPE_CHECKING:
    import torch

SUFFIXES = (".safetensors", ".npz")
MOST_BYTES = 2**34
"""More than an ``.npz`` may unpack to: a few megabytes of zip can declare, and fill, terabytes."""

_ARRAY = ".npy"
_DTYPES = frozenset(DTYPES.values())


@dataclass(frozen=True, slots=True)
class TensorHead:
    """What a file says of a tensor before its data: the ``dtype`` by torch's name, and the ``shape``."""

    dtype: str
    shape: tuple[int, ...]


def read_heads(key: str, file: Path) -> dict[str, TensorHead]:
    """Return the tensors that ``file`` declares, by name; a ``ConfigError`` that begins with ``key`` if it is unsound.

    Needs no torch, and reads no data.
    """
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"{key}: {str(file)!r} is no {' or '.join(SUFFIXES)} file; give one of named tensors")
    if file.suffix == ".npz":
        with _opened_zip(key, file) as (_, heads):
            return heads
    try:
        _, extents = read_header(file)
    except (CheckpointError, OSError) as error:
        raise ConfigError(f"{key}: {error}") from error
    return {name: TensorHead(extent.dtype, extent.shape) for name, extent in extents.items()}


def read_tensors(key: str, file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of ``file`` by name, on the cpu; raises as ``read_heads`` does."""
    import torch

    if file.suffix == ".npz":
        with _opened_zip(key, file) as (archive, heads):
            return {name: torch.from_numpy(_array(archive, name)) for name in heads}
    from offstage.stages.checkpoints.readers import read_extent

    read_heads(key, file)
    try:
        return {name: read_extent(extent) for name, extent in read_header(file)[1].items()}
    except (CheckpointError, OSError) as error:
        raise ConfigError(f"{key}: {error}") from error


@contextmanager
def _opened_zip(key: str, file: Path) -> Iterator[tuple[zipfile.ZipFile, dict[str, TensorHead]]]:
    """Open the ``.npz`` at ``file`` and lend it, with what its arrays' heads say."""
    try:
        raw = open(open_regular(file), "rb")  # noqa: PTH123, SIM115 a descriptor
    except OSError as error:
        raise ConfigError(f"{key}: {str(file)!r} can't be read: {error.strerror or error}") from apart(error)
    with raw, foreign(ConfigError, f"{key}: {str(file)!r} is no .npz of plain arrays"), zipfile.ZipFile(raw) as archive:
        yield archive, _heads(archive)


def _heads(archive: zipfile.ZipFile) -> dict[str, TensorHead]:
    members = archive.infolist()
    if not members:
        raise ValueError("it holds no arrays")
    total = sum(member.file_size for member in members)
    if total > MOST_BYTES:
        raise ValueError(f"its arrays are {total} bytes; at most {MOST_BYTES} are accepted")
    heads: dict[str, TensorHead] = {}
    for member in members:
        name = member.filename.removesuffix(_ARRAY)
        if not member.filename.endswith(_ARRAY) or not name or name in heads:
            raise ValueError(f"its member {member.filename!r} is no array, or is there twice")
        with archive.open(member) as stream:
            heads[name] = _head(stream, member)
    return heads


def _head(stream: IO[bytes], member: zipfile.ZipInfo) -> TensorHead:
    from numpy.lib import format as npy

    version = npy.read_magic(stream)
    if version > (2, 0):
        raise ValueError(f"{member.filename!r} is of version {version}, as no plain array is")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.name not in _DTYPES:
        raise ValueError(f"{member.filename!r} has dtype {dtype}, which is none of numbers that torch has")
    if stream.tell() + math.prod(shape) * dtype.itemsize != member.file_size:
        raise ValueError(
            f"{member.filename!r} has {member.file_size} bytes, and its shape {shape} takes another number"
        )
    return TensorHead(dtype.name, tuple(map(int, shape)))


def _array(archive: zipfile.ZipFile, name: str) -> Any:
    """Return the array of that name in the machine's own order of bytes, in memory that torch may own."""
    import numpy as np
    from numpy.lib import format as npy

    with archive.open(name + _ARRAY) as stream:
        array = npy.read_array(stream, allow_pickle=False)
    return np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
