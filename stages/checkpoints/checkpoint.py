"""A checkpoint on disk as data: its format, its files, and what is known of its tensors without loading any.

Needs no torch, so that a run that is served from the cache can tell in milliseconds whether the checkpoint
is the one that it knows.
"""

from __future__ import annotations

import hashlib
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from offstage.pipeline.errors import CheckpointError
from offstage.pipeline.regular_files import read_regular
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.gguf_header import read_gguf_header
from offstage.stages.checkpoints.looks import Look, look_at
from offstage.stages.checkpoints.safetensors_header import read_header
from offstage.stages.checkpoints.shard_files import ShardFile, check_regular, locate, opened, read_at
from offstage.stages.checkpoints.weight_files import SUFFIXES, Format, find_weights, read_weight_map

if TYPE_CHECKING:
    from offstage.stages.checkpoints.quantised_copy import QuantisedCopy

Depth = Literal["index", "headers"]
"""How much of a checkpoint is looked at: which files there are, or their headers too."""

FileHeader = tuple[ShardFile, dict[str, Extent]]
"""A file of a checkpoint, and the tensors that it holds."""

ZIP_MAGIC = b"PK\x03\x04"

_EDGE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: a folder, or a file on its own.

    ``entries`` holds every tensor by its name in the checkpoint; for ``.bin`` it is empty, since a pickle tells its
    tensors only when it is loaded; those of GGUF are bytes, by the file's own names. ``weight_map`` is the index
    (tensor name → file name), or null without one. ``copy`` is what some of its
    tensors rest in once they are quantised by the key ``model.quantize``; all else here is of the checkpoint itself.
    """

    path: Path
    format: Format
    files: tuple[ShardFile, ...]
    entries: Mapping[str, Extent]
    weight_map: Mapping[str, str] | None = None
    index_name: str | None = None
    copy: QuantisedCopy | None = None

    @property
    def folder(self) -> Path:
        """The folder that the files lie in."""
        return self.path if self.index_name or self.path.is_dir() else self.path.parent

    @property
    def place(self) -> str:
        """Where the checkpoint lies, links followed."""
        return str(self.path.resolve())

    @property
    def stored(self) -> Mapping[str, Extent]:
        """Every tensor as it lies in a file, those of its copy as they lie there."""
        return self.entries if self.copy is None else self.copy.stored

    @property
    def tells_places(self) -> bool:
        """Whether it is known where in its files each tensor lies."""
        return self.format != "bin" or self.copy is not None

    @property
    def bytes(self) -> int:
        """The size of all files in bytes."""
        return sum(file.size for file in self.files)


def open_checkpoint(path: Path, *, allow_links: bool = False, depth: Depth = "headers") -> Checkpoint:
    """Return the checkpoint at ``path``: a folder, a weights file, or an index.

    Every header is read and checked, no data is. With ``depth`` "index" no shard is opened, so the checkpoint has no
    entries and its files no digests. A ``CheckpointError`` names the file and the tensor that are wrong.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such checkpoint; give a checkpoint's folder or file as model.path")
    if path.is_dir():
        name, kind = find_weights(path)
        return _open_named(path, name, kind, allow_links=allow_links, depth=depth)
    if path.suffix == ".json":
        return _open_named(path.parent, path.name, None, allow_links=allow_links, depth=depth)
    if path.suffix not in SUFFIXES:
        raise CheckpointError(f"{path}: not a weights file; known suffixes: {', '.join(SUFFIXES)}")
    return _read_files(path, SUFFIXES[path.suffix], [path], depth=depth)


def fingerprint_of(path: Path, *, allow_links: bool = False) -> Mapping[str, object]:
    """Return what identifies the checkpoint at ``path`` by its content, without hashing all of its weights.

    That is the SHA-256 of the config's and the index's bytes, and each shard's name, size, header hash and digest of
    samples: see ``identity``.
    """
    return identity(open_checkpoint(path, allow_links=allow_links))


def identity(checkpoint: Checkpoint) -> Mapping[str, object]:
    """Return what identifies ``checkpoint``, which is open already, by its content: times and places have no part.

    Where only the index was looked at nothing is known of what the files hold, and each is told by its time instead.
    """
    looks = looks_at(checkpoint)
    return {
        **small_files(checkpoint),
        "files": [
            [file.name, file.size, look.header, look.sampled] if look else [file.name, file.size, file.mtime_ns, ""]
            for file, look in zip(checkpoint.files, looks, strict=True)
        ],
    }


def small_files(checkpoint: Checkpoint) -> dict[str, str | None]:
    """Return the format of ``checkpoint``, and the SHA-256 of its config and its index where it has them."""
    folder = checkpoint.folder
    return {
        "format": checkpoint.format,
        "config": _hash_of(folder / "config.json"),
        "index": _hash_of(folder / checkpoint.index_name) if checkpoint.index_name else None,
    }


def looks_at(checkpoint: Checkpoint) -> list[Look | None]:
    """Return what is known of the content of each file of ``checkpoint``; null where only the index was looked at."""
    return [look_at(file, tensors) if file.digest else None for file, tensors in entries_by_file(checkpoint)]


def entries_by_file(checkpoint: Checkpoint) -> Iterator[tuple[ShardFile, dict[str, Extent]]]:
    """Yield each file of ``checkpoint`` and the tensors that it holds; none of a ``.bin``, which doesn't tell them."""
    by_file: dict[str, dict[str, Extent]] = {file.name: {} for file in checkpoint.files}
    for name, entry in checkpoint.entries.items():
        by_file[entry.file.name][name] = entry
    return ((file, by_file[file.name]) for file in checkpoint.files)


def _open_named(folder: Path, name: str, kind: Format | None, *, allow_links: bool, depth: Depth) -> Checkpoint:
    """Open the file or index ``name`` in ``folder``, in the format ``kind``; null: that of its shards' names."""
    path = locate(folder, name, allow_links=allow_links)
    if not name.endswith(".json"):
        return _read_files(folder, kind or SUFFIXES[path.suffix], [path], depth=depth)
    weight_map = read_weight_map(path)
    shards = [locate(folder, shard, allow_links=allow_links) for shard in dict.fromkeys(sorted(weight_map.values()))]
    kind = kind or ("safetensors" if all(shard.suffix == ".safetensors" for shard in shards) else "bin")
    checkpoint = replace(_read_files(folder, kind, shards, depth=depth), weight_map=weight_map, index_name=name)
    if kind == "safetensors" and depth == "headers":
        check_index(checkpoint, checkpoint.entries)
    return checkpoint


def check_index(checkpoint: Checkpoint, entries: Mapping[str, Extent]) -> None:
    """Refuse an index that names a tensor its shard doesn't hold, or leaves out one that a shard holds."""
    index = checkpoint.folder / str(checkpoint.index_name)
    for name, file in (checkpoint.weight_map or {}).items():
        if name not in entries or entries[name].file.name != file:
            raise CheckpointError(f"{index}: tensor {name!r} is said to lie in {file}, which doesn't hold it")
    for name, entry in entries.items():
        if name not in (checkpoint.weight_map or {}):
            raise CheckpointError(f"{index}: leaves out tensor {name!r}, which {entry.file.name} holds")


def _read_files(path: Path, kind: Format, shards: Iterable[Path], *, depth: Depth) -> Checkpoint:
    if depth == "index":
        return Checkpoint(path, kind, tuple(map(_survey, shards)), {})
    return Checkpoint(path, kind, *join_headers(map(_HEADERS[kind], shards)))


def join_headers(headers: Iterable[FileHeader]) -> tuple[tuple[ShardFile, ...], dict[str, Extent]]:
    """Return the files of ``headers``, and all tensors by name; a ``CheckpointError`` for one that two of them have."""
    files: list[ShardFile] = []
    entries: dict[str, Extent] = {}
    for file, header in headers:
        for name in header.keys() & entries.keys():
            problem = f"tensor {name!r} is in {entries[name].file.name} too; one of them must go"
            raise CheckpointError(f"{file.path}: {problem}")
        files.append(file)
        entries |= header
    return tuple(files), entries


def _read_gguf(path: Path) -> FileHeader:
    header = read_gguf_header(path)
    return header.file, {name: tensor.extent for name, tensor in header.tensors.items()}


def _survey(path: Path) -> ShardFile:
    status = check_regular(path)
    return ShardFile(path.name, path, status.st_size, status.st_mtime_ns, "")


def _read_bin(path: Path) -> FileHeader:
    file = _survey(path)
    return replace(file, digest=_contents_hash(path, file.size)), {}


_HEADERS: Mapping[Format, Callable[[Path], FileHeader]] = {
    "safetensors": read_header,
    "bin": _read_bin,
    "gguf": _read_gguf,
}
"""What tells a file's tensors without loading any, by format."""


def _contents_hash(path: Path, size: int) -> str:
    """Return the hash of a zip's directory (each record's CRC is in it), or of the first and last 64 KiB."""
    edges = [(0, min(size, _EDGE_BYTES)), (max(0, size - _EDGE_BYTES), min(size, _EDGE_BYTES))]
    digest = hashlib.sha256()
    with opened(path) as descriptor:
        magic = read_at(descriptor, 0, min(len(ZIP_MAGIC), size), path)
        for offset, length in _directory_span(path, size) if magic == ZIP_MAGIC else edges:
            digest.update(read_at(descriptor, offset, length, path))
    return digest.hexdigest()


def _directory_span(path: Path, size: int) -> list[tuple[int, int]]:
    """Return where the directory of the zip ``path`` lies; refuse entries that can't be used where they lie."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries, begin = archive.infolist(), archive.start_dir
    except (zipfile.BadZipFile, OSError, ValueError, RuntimeError, struct.error) as error:
        raise CheckpointError(f"{path}: can't be loaded, get it again: {error}") from error
    names: set[str] = set()
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size or entry.flag_bits & 1:
            raise CheckpointError(
                f"{path}: its entry {entry.filename!r} is compressed or encrypted, and tensors are read where they "
                "lie; save the model again with torch.save or as safetensors, or pack the file without compression"
            )
        if entry.filename in names:
            raise CheckpointError(f"{path}: has two entries {entry.filename!r}; get the file again")
        names.add(entry.filename)
    return [(begin, size - begin)]


def _hash_of(path: Path) -> str | None:
    return hashlib.sha256(read_regular(path)).hexdigest() if path.is_file() else None
