"""What identifies weights by their content without reading all of it: digests of bytes sampled from every tensor.

The places are fixed by a tensor's size alone and counted from its beginning, so that a tensor has one digest wherever
it lies: in another shard, in another folder, on another machine. Of a file that doesn't tell where its tensors lie
(``.bin``) the samples are spread over the whole. A change that no sample meets isn't seen: the SHA-256 of the file
sees it. Needs no torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.shard_files import ShardFile, check_unchanged, opened_shard, read_at
from offstage.stages.machine.probes import READING_THREADS

BLOCK_BYTES = 8 * 1024
BLOCKS = 8
"""As many blocks of a tensor are read, the first and the last of them at its ends; a smaller one is read whole."""
FILE_BLOCKS = 256
"""The same for a file that doesn't tell its tensors."""
_EACH = 64
"""Tensors that one thread reads before it takes others."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What samples of one file came to: ``digest`` stands for all of them, ``tensors`` has each tensor's in order."""

    digest: str
    tensors: tuple[str, ...]


def sample(file: ShardFile, tensors: Mapping[str, Extent]) -> Sampled:
    """Return what samples of ``file`` come to, which holds ``tensors``; without any, of the file as a whole.

    A ``CheckpointError`` names the file if it isn't as it was opened, or changes meanwhile.
    """
    with opened_shard(file) as descriptor:
        with suppress(OSError):  # reading ahead of samples is of no use
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        digests = _read_all(descriptor, file, list(tensors.values())) if tensors else ()
        whole = hashlib.sha256()
        for name, digest in zip(tensors, digests, strict=True):
            whole.update(f"{name}\0{digest}\n".encode())
        if not tensors:
            _read(descriptor, file, places(file.size, FILE_BLOCKS), whole)
        check_unchanged(file, descriptor)
    return Sampled(whole.hexdigest(), digests)


def places(size: int, blocks: int = BLOCKS) -> list[tuple[int, int]]:
    """Return which bytes of ``size`` are sampled: begin and length of each block, in order."""
    if size <= blocks * BLOCK_BYTES:
        return [(0, size)]
    return [((size - BLOCK_BYTES) * index // (blocks - 1), BLOCK_BYTES) for index in range(blocks)]


def _read_all(descriptor: int, file: ShardFile, extents: Sequence[Extent]) -> tuple[str, ...]:
    from concurrent.futures import ThreadPoolExecutor

    def digests(some: Iterable[Extent]) -> list[str]:
        return [_digest(descriptor, file, extent) for extent in some]

    groups = [extents[begin : begin + _EACH] for begin in range(0, len(extents), _EACH)]
    with ThreadPoolExecutor(READING_THREADS) as pool:
        return tuple(digest for group in pool.map(digests, groups) for digest in group)


def _digest(descriptor: int, file: ShardFile, extent: Extent) -> str:
    digest = hashlib.sha256(f"{extent.dtype}\0{list(extent.shape)}\0".encode())
    _read(descriptor, file, [(extent.begin + begin, count) for begin, count in places(extent.bytes)], digest)
    return digest.hexdigest()


def _read(descriptor: int, file: ShardFile, spans: Iterable[tuple[int, int]], into: hashlib._Hash) -> None:
    for begin, count in spans:
        into.update(read_at(descriptor, begin, count, file.path))
