"""What Python itself does with memory, put off or given room while a stage makes much that stays, or calls deep.

It looks for cycles among tens of thousands of small objects that have none. And CPython (3.11 and later) keeps the
frames of calls in pieces of 16 kB, and maps and unmaps a piece at each call that goes over the end of the last: 6 µs,
two hundred times what a call takes, for every call of a loop that happens to run at such a depth. A piece is as large
as its first frame needs, to a power of two.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import ParamSpec, TypeVar, cast

_frozen_once = False
"""Whether something was frozen when that was last asked: the answer takes a walk through all that is, 90 ms where torch
and transformers are."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python from looking for cycles in the block, and afterwards from looking at once at all that it made.

    Imports and tens of thousands of names leave no cycles, and have it look a hundred times at all there is; what it
    was kept from it makes up for at the first object after. What is there at the end counts as old instead: it is
    looked at when all is. Where something was once found frozen (``gc.freeze``) that stays so, and nothing counts as
    old.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not _is_frozen():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _is_frozen() -> bool:
    global _frozen_once
    _frozen_once = _frozen_once or gc.get_freeze_count() > 0
    return _frozen_once


Given = ParamSpec("Given")
Returned = TypeVar("Returned")

_SLOTS = 2**15
"""How many values a frame has room for here: its piece is 512 kB, half of which is left to all calls below, a thousand
deep. No page of it is touched that isn't used."""


def with_frame_room(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Have ``function``, a plain one, begin a piece with room for all that it calls; return it."""
    plain = cast(FunctionType, function)
    plain.__code__ = plain.__code__.replace(co_stacksize=_SLOTS)
    return function
