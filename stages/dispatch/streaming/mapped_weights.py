"""Weights that the host uses where a memory map of their shard has them: bound for good, with nothing to bring."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from stages.checkpoints.extents import Extent
from stages.checkpoints.mapped_file import MappedFile
from stages.checkpoints.shard_files import ShardFile
from stages.dispatch.streaming.slots import Slot
from stages.dispatch.transfer.carrier import Traffic


class MappedWeights:
    """The maps of one model's shards; a context manager that puts what waited back and closes the files."""

    def __init__(self, extents: Mapping[str, Extent], traffic: Traffic) -> None:
        self._extents, self._traffic = extents, traffic
        self._stack = ExitStack()
        self._files: dict[ShardFile, MappedFile] = {}

    def __enter__(self) -> MappedWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def bind(self, slots: Sequence[Slot], callers: Iterable[nn.Module], *, looked_up: bool) -> None:
        """Bind ``slots`` to the maps of their shards, checked before each call of a module of ``callers``.

        ``looked_up`` says that a call touches a few rows, anywhere; without it, that it streams all bytes.
        """
        if not slots:
            return
        files = []
        for slot in slots:
            extent = self._extents[slot.name]
            file = self._open(extent.file)
            file.advise([extent], mmap.MADV_RANDOM if looked_up else mmap.MADV_WILLNEED)
            slot.bind(file.tensor(extent))
            self._stack.callback(slot.unbind)
            files.append(file)
        streamed = 0 if looked_up else sum(self._extents[slot.name].bytes for slot in slots)
        self._watch(files, callers, streamed=streamed)

    def _open(self, file: ShardFile) -> MappedFile:
        if file not in self._files:
            self._files[file] = MappedFile(file)
            self._stack.callback(self._files[file].close)
        return self._files[file]

    def _watch(self, files: Sequence[MappedFile], callers: Iterable[nn.Module], *, streamed: int) -> None:
        """Check ``files`` before each use, and count the bytes ``streamed``."""

        def check(_module: nn.Module, _args: Any) -> None:
            for file in files:
                file.check()
            self._traffic.streamed_bytes += streamed

        for module in callers:
            self._stack.callback(module.register_forward_pre_hook(check, prepend=True).remove)
