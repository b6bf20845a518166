"""What computing takes of a simulated accelerator: each new tensor is a block of its allocator while it lives."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offstage.stages.machine.caching_allocator import Block, CachingAllocator


class SimulatedMemory(TorchDispatchMode):
    """Takes of ``allocator`` what operators make in this thread: a ``BudgetError`` where the accelerator is full.

    What they make of their operands' own storage is there already.
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        super().__init__()
        self._allocator = allocator
        self._gone: deque[Block] = deque()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        while self._gone:
            self._allocator.free(self._gone.popleft())
        known = {_storage(tensor)._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in filter(lambda each: isinstance(each, torch.Tensor) and not each.is_meta, tree_leaves(result)):
            storage = _storage(tensor)
            if storage.nbytes() and storage._cdata not in known:
                known.add(storage._cdata)
                block = self._allocator.allocate(storage.nbytes())
                weakref.finalize(storage, self._gone.append, block).atexit = False
        return result


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
