"""Checks that read every byte: what headers can't show."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.byte_bar import byte_bar
from offstage.stages.checkpoints.checkpoint import Checkpoint, entries_by_file, looks_at
from offstage.stages.checkpoints.looks import remember_whole
from offstage.stages.checkpoints.shard_files import (
    ShardFile,
    check_regular,
    check_unchanged,
    hub_digest,
    opened_shard,
    read_into,
)
from offstage.stages.machine.probes import READING_THREADS

_BLOCK_BYTES = 4 * 2**20


def hold(checkpoint: Checkpoint) -> Checkpoint:
    """Return ``checkpoint`` with each file held to its present state, to be hashed next.

    Whatever is written to a file from now on is noticed at its next use, also where size and time are set back: what is
    served is what was hashed.
    """
    files = {file: replace(file, changed_ns=check_regular(file.path).st_ctime_ns) for file in checkpoint.files}
    entries = {name: replace(entry, file=files[entry.file]) for name, entry in checkpoint.entries.items()}
    return replace(checkpoint, files=tuple(files.values()), entries=entries)


def whole_digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the SHA-256 in hex of each file of ``checkpoint``, by name: remembered of those that nobody changed since.

    A file in the Hub's cache must have the bytes that the Hub names it by; a ``CheckpointError`` names one that hasn't.
    """
    remembered = {
        file.name: look.sha256
        for file, look in zip(checkpoint.files, looks_at(checkpoint), strict=True)
        if look and look.sha256
    }
    computed = _hash_all([file for file in checkpoint.files if file.name not in remembered])
    for file, tensors in entries_by_file(checkpoint):
        if file.name in computed:
            _check_hub(file, computed[file.name])
            remember_whole(file, tensors, computed[file.name])
    return {file.name: remembered.get(file.name) or computed[file.name] for file in checkpoint.files}


def _check_hub(file: ShardFile, digest: str) -> None:
    named = hub_digest(file.path)
    if named is not None and named != digest:
        raise CheckpointError(
            f"{file.path}: its bytes are not those that the Hub names the file by (SHA-256 {digest[:16]}… instead of "
            f"{named[:16]}…); get the file again"
        )


def hash_files(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the SHA-256 in hex of each file of ``checkpoint``, by name; each is read to its end."""
    return _hash_all(checkpoint.files)


def _hash_all(files: Iterable[ShardFile]) -> dict[str, str]:
    from concurrent.futures import ThreadPoolExecutor

    files = list(files)
    if not files:
        return {}
    with byte_bar("hashing", sum(file.size for file in files)) as bar, ThreadPoolExecutor(READING_THREADS) as pool:
        digests = pool.map(partial(_hash, bar.update), files)
        return {file.name: digest for file, digest in zip(files, digests, strict=True)}


def check_hashes(checkpoint: Checkpoint, expected: Mapping[str, str]) -> None:
    """Raise a ``CheckpointError`` that names the first file whose bytes are not those of ``expected``."""
    for name, digest in hash_files(checkpoint).items():
        if expected.get(name, digest) != digest:
            raise CheckpointError(
                f"{checkpoint.folder / name}: its bytes are not those that were verified before "
                f"(SHA-256 {digest[:16]}… instead of {expected[name][:16]}…); get the file again"
            )


def _hash(progress: Callable[[int], object], file: ShardFile) -> str:
    digest, buffer = hashlib.sha256(), bytearray(_BLOCK_BYTES)
    with opened_shard(file) as descriptor:
        for offset in range(0, file.size, _BLOCK_BYTES):
            view = memoryview(buffer)[: min(_BLOCK_BYTES, file.size - offset)]
            read_into(descriptor, view, offset=offset, path=file.path)
            digest.update(view)
            progress(len(view))
        check_unchanged(file, descriptor)
    return digest.hexdigest()
