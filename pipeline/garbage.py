"""Python's search for cycles, put off while a stage makes tens of thousands of small objects that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

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
