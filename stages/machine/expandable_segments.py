"""Torch's allocator with ``expandable_segments``: each pool is one segment that grows, where the accelerator can.

Addresses are reserved for more than the accelerator has, and memory is put behind them page by page: pages of 2 MiB for
small blocks, of 20 MiB for large ones. So what is freed between two blocks needn't be of the next one's size to be of
use: the last block grows, and a segment of its own has nobody. A block's rest is always split off.

Not each accelerator can do it (a share of one under a virtual machine, Jetson, WSL2), and there the first allocation
fails: a process of its own tries, once a machine. Where it works, and where nobody has a setting of torch's allocator
in the environment, plans go by it, and say so. It is set for the process that places their weights, just before the
first lies on an accelerator, and in its environment, by which processes that it starts go.
"""

from __future__ import annotations

import os
import warnings
from bisect import insort

from offstage.pipeline.environment import ALLOCATOR_SETTINGS, allocator_settings
from offstage.stages.machine.caching_allocator import (
    BLOCK_BYTES,
    LARGE_SEGMENT,
    SMALL_SEGMENT,
    Block,
    CachingAllocator,
    Pool,
)

SETTING = "expandable_segments:True"
_OFF = "expandable_segments:False"
_ADDRESSES = 2**25 * LARGE_SEGMENT
"""Bytes of addresses that a pool has, in whole pages: more than there is memory."""


def are_on() -> bool:
    """Return whether segments expand, by the settings that the environment has for torch's allocator."""
    entries = (allocator_settings() or "").replace(" ", "").split(",")
    settings = [entry for entry in entries if entry.startswith("expandable_segments:")]
    return settings[-1:] == [SETTING]


def would_expand(*, can: bool = True) -> bool:
    """Return whether segments of this process expand once they are turned on, where they ``can``. Nothing is changed.

    Where the environment has settings these stay as they are, and so they do where something lies on an accelerator.
    """
    import torch

    if allocator_settings() is not None:
        return are_on()
    return can and not any(torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count()))


def turn_on() -> bool:
    """Have segments of this process expand where ``would_expand`` says so; return whether they do from now on."""
    if not would_expand():
        return False
    if not are_on():
        _set(SETTING)
        os.environ[ALLOCATOR_SETTINGS[0]] = SETTING
    return True


def try_out() -> bool:
    """Take memory of accelerator 0; return whether its segments can expand, which they do from then on.

    For a process of its own, in which nothing lies there yet.
    """
    import torch

    expand = turn_on()
    try:
        torch.zeros(1, device="cuda:0")
    except RuntimeError:
        if not expand:
            raise
        os.environ[ALLOCATOR_SETTINGS[0]] = _OFF
        _set(_OFF)
        torch.zeros(1, device="cuda:0")
        return False
    return expand


def _set(settings: str) -> None:
    """Have torch's allocator go by ``settings`` from now on, whatever the environment said as torch was imported."""
    import torch

    with warnings.catch_warnings():  # torch calls it otherwise from 2.13 on, and says so
        warnings.simplefilter("ignore", FutureWarning)
        torch.cuda.memory._set_allocator_settings(settings)


class ExpandableAllocator(CachingAllocator):
    """The allocator of an accelerator whose segments expand."""

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self._unbacked: dict[Pool, list[tuple[int, Block]]] = {}  # by address

    def _fitting(self, pool: Pool, size: int) -> Block | None:
        """Return the smallest free block that will do, before the one that could grow."""
        block = super()._fitting(pool, size)
        if block is None or block.behind is None or block.behind.is_backed:
            return block
        other = super()._fitting(pool, size)
        if other is not None:
            self._keep(block)
        return other or block

    def _new_segment(self, pool: Pool, size: int) -> Block:
        """Return a free block of ``size`` bytes, behind which there is memory now: the lowest that can be had."""
        block = self._chain(pool, size)
        if self._is_short(missing := self._missing(block, size)):
            self._give_back()
            block = self._chain(pool, size)
            if self._is_short(missing := self._missing(block, size)):
                raise self._full(missing, size)
        while True:
            if not block.is_backed:
                block = self._back(block, size)
            if block.size >= size:
                self._forget(block)
                return block
            assert block.behind is not None
            block = self._back(block.behind, size - block.size)

    def _is_of_use(self, block: Block, left: int) -> bool:
        return left >= BLOCK_BYTES

    def _chain(self, pool: Pool, size: int) -> Block:
        """Return the first of blocks that follow each other, free or without memory, and have addresses for ``size``
        bytes.
        """
        if pool not in self._unbacked:
            begin = len(self._unbacked) * _ADDRESSES
            self._unbacked[pool] = [(begin, Block(pool, begin, _ADDRESSES, is_backed=False))]
        for _, block in self._unbacked[pool]:
            first = block.before if block.before is not None and block.before.is_free else block
            last: Block | None = first
            room = 0
            while last is not None and room < size and (last.is_free or not last.is_backed):
                room, last = room + last.size, last.behind
            if room >= size:
                return first
        raise AssertionError("addresses have no end")

    def _missing(self, block: Block | None, size: int) -> int:
        """Return the bytes of memory that are put behind ``block`` and its followers for ``size`` bytes."""
        missing = 0
        while block is not None and size > 0:
            missing += 0 if block.is_backed else min(block.size, _in_pages(block.pool, size))
            size, block = size - block.size, block.behind
        return missing

    def _back(self, block: Block, size: int) -> Block:
        """Put memory behind the first ``size`` bytes of ``block``, in whole pages; return the free block of which they
        are part then.
        """
        pages = min(block.size, _in_pages(block.pool, size))
        self._unbacked[block.pool].remove((block.begin, block))
        if pages < block.size:
            rest = self._cut(block, pages)
            insort(self._unbacked[block.pool], (rest.begin, rest), key=lambda each: each[0])
        block.is_backed = True
        self._reserve(pages)
        return self._join(block)

    def _give_back(self) -> None:
        """Take the memory from behind all whole pages that are free."""
        for block in [entry[-1] for blocks in self._free.values() for entry in blocks]:
            page = _in_pages(block.pool, 1)
            begin, end = -(-block.begin // page) * page, (block.begin + block.size) // page * page
            if begin >= end:
                continue
            self._forget(block)
            if begin > block.begin:
                head, block = block, self._cut(block, begin - block.begin)
                self._keep(head)
            if end < block.begin + block.size:
                self._keep(self._cut(block, end - begin))
            block.is_free = block.is_backed = False
            insort(self._unbacked[block.pool], (block.begin, block), key=lambda each: each[0])
            self.reserved -= block.size


def caching_allocator(*, expands: bool) -> CachingAllocator:
    """Return the model of torch's allocator, with segments that expand or without."""
    return ExpandableAllocator() if expands else CachingAllocator()


def _in_pages(pool: Pool, size: int) -> int:
    page = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT
    return -(-size // page) * page
