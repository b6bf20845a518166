"""The link: what the pipeline needs to know of an accelerator.

All work for an accelerator is asked for and done later, in one order for computing, in another for copies, in a third
for copies that a forward waits for, and in a fourth for unpacking. What ties the orders together are events: computing
that was asked for after ``follow`` begins when the event has happened, and a copy begins when the event ``after`` has.
No waiting stops the thread that asks.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from offstage.stages.dispatch.transfer.arena import Memory
from offstage.stages.machine.aligned_memory import Bytes
from offstage.stages.units import format_bytes

_log = logging.getLogger(__name__)

Operators = Callable[[Sequence[torch.Tensor], torch.Tensor], None]
"""Torch's operators, on tensors of bytes, that write to another one; nothing in them waits for the accelerator."""

Piece = tuple[torch.Tensor, torch.Tensor]
"""Bytes on the host, and as many of an accelerator's memory that they are copied into."""

Event = object | None
"""A moment in the order of an accelerator's work; each link knows its own kind."""


class Moved(NamedTuple):
    """What a job has brought, or asked a link for: when it is ``done``, null where it is, and what it took."""

    done: Event = None
    copied_bytes: int = 0
    stored_bytes: int = 0


class Link(Protocol):
    """One accelerator, as what brings weights there sees it, or the host: that is ``in_place``.

    Where it doesn't say otherwise all that is asked for is done at once, and there is nothing to wait for.
    """

    @property
    def in_place(self) -> bool:
        """Whether its memory is the host's own: what is read or unpacked into it needs no copy."""

    def memory(self, size: int) -> Memory[torch.Tensor]:
        """Return ``size`` bytes of the accelerator's memory; a ``BudgetError`` where it is full."""

    def computed(self) -> Event:
        """Return the moment when all is computed that was asked for by now; for the thread that runs the model."""

    def follow(self, event: Event) -> None:
        """Have all that is computed from now on begin after ``event``; for the thread that runs the model."""
        return

    def stalled(self) -> float:
        """Return the seconds that computing has waited for what it followed, as far as that is over by now, since this
        was asked last. It is the accelerator's time: the thread that runs the model doesn't wait.
        """
        return 0.0

    def copy(self, pieces: Sequence[Piece], *, after: Event, urgent: bool = False) -> Event:
        """Have each of ``pieces`` copied after ``after``; return when all are.

        Copies are done in the order in which they were asked for, those that are ``urgent`` in an order of their own:
        none of the others is before them. Until then what they copy must stay as it is.
        """

    def unpack(
        self,
        operators: Operators,
        data: Sequence[torch.Tensor],
        target: torch.Tensor,
        *,
        after: Sequence[Event],
        scratch_bytes: int,
    ) -> Event:
        """Have ``operators`` make ``target`` of ``data``, both in the accelerator's memory, after all of ``after``.

        Returns when it is done. It is done beside copies and computing, in the order in which it was asked for, and
        takes so many ``scratch_bytes`` of the accelerator's memory meanwhile.
        """

    def finish(self, event: Event) -> None:
        """Wait here until ``event`` has happened; never in the thread that runs the model, but to close."""
        return

    def register(self, memory: Bytes) -> bool:
        """Make ``memory`` known to the accelerator, so that it copies from there by itself; return whether it did."""
        return True

    def unregister(self, address: int) -> None:
        """Undo ``register`` for the memory at ``address``."""
        return

    def close(self) -> None:
        """Wait until the accelerator has done all that was asked of it."""
        return


class CopyBack:
    """A copy over ``link`` to where something computes, whose ``source`` and ``target`` live until it is done.

    Where nobody wants it after all it is waited for: their memory goes to others then, which don't know of it.
    """

    def __init__(self, link: Link, source: torch.Tensor, target: torch.Tensor, *, urgent: bool = False) -> None:
        self._link, self._ends = link, (source, target)
        self._done: Event = None
        self._done = link.copy([(source, target)], after=link.computed(), urgent=urgent)

    def follow(self) -> None:
        """Put what is computed from now on behind the copy."""
        self._link.follow(self._done)
        self._done = None

    def __del__(self) -> None:
        if self._done is not None:
            self._link.finish(self._done)


def pin(link: Link, memory: Bytes) -> Callable[[], object]:
    """Register ``memory`` until the function that is returned is called, or the memory is gone.

    Where the system refuses, copies from there are slower and stop the thread that asks for them; the log says so.
    """
    if not link.register(memory):
        _log.warning(
            "%s of host memory can't be registered with the accelerator; copies from there will be slower",
            format_bytes(memory.nbytes),
        )
        return lambda: None
    undo = weakref.finalize(memory, link.unregister, memory.ctypes.data)
    undo.atexit = False  # the process's end is the memory's
    return undo
