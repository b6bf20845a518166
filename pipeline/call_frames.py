"""Room for the frames of Python's calls, so that none of them is mapped and unmapped again and again.

CPython (3.11 and later) keeps frames in pieces of 16 kB, and maps and unmaps a piece at each call that goes over the
end of the last: 6 µs, two hundred times what a call takes, for every call of a loop that happens to run at such a
depth. A piece is as large as its first frame needs, to a power of two.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import ParamSpec, TypeVar, cast

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
