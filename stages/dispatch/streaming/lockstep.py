"""Lockstep: several calls of one model go through it together, so that a pass of its weights serves them all.

Each call is an ordinary one, of its own shape and with its own cache, and computes exactly what it computes alone: what
is shared is the weights and not the arithmetic, whose last bits would depend on the batch. One call runs at a time. At
each streamed part it stops, and the turn goes on; once all have come as far, the part is brought, used by each in turn,
and let go. Calls join and leave where passes begin.

A member is a greenlet: all run in one thread of the system, since a second one would bring a second team of OpenMP's.
Each has random numbers of its own, which go on from where they were as it began; none records gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextvars import copy_context
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import greenlet
import torch

Task = Callable[[], object]


class Shared(Protocol):
    """What members wait for to use it one after another; ``place`` is when it comes in a pass."""

    @property
    def place(self) -> int:
        """Where it stands in the order of a pass."""

    def expect(self, users: int) -> None:
        """Hear that so many more will use it, before it may be let go."""


class Turns:
    """Who may go on: without lockstep, whoever asks. The hooks of a model ask it at each pass and each shared part."""

    def begin_pass(self) -> bool:
        """Say that a pass of the model is to begin; return whether it is for the caller to begin it."""
        return True

    def end_pass(self) -> bool:
        """Say that the caller's pass has ended well; return whether it is for the caller to end it."""
        return True

    def wait_for(self, shared: Shared) -> None:
        """Return when it is the caller's turn to use ``shared``."""


ALONE = Turns()


@dataclass(slots=True, eq=False)
class _Member:
    """One call under way: what it waits for (null: the next pass), and the state of its random numbers."""

    thread: greenlet.greenlet
    random: torch.Tensor
    wants: Shared | None = None
    in_pass: bool = False
    depth: int = 0


class Lockstep(Turns):
    """The members of one group, at most ``size`` at a time; ``passes`` counts the passes that they shared.

    ``started`` is how many of them there were.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._members: list[_Member] = []
        self._current: _Member | None = None
        self._leads = False
        self.passes = self.started = 0

    def run(self, tasks: Iterable[Task]) -> None:
        """Call all ``tasks``, whose calls of the model go together. The first error of one ends them all."""
        waiting = iter(tasks)
        try:
            while self._admit(waiting):
                self._step()
        finally:
            self._dismiss()

    def _admit(self, waiting: Iterator[Task]) -> bool:
        """Have tasks join as far as there is room; return whether anything is left to do."""
        while len(self._members) < self._size and (found := next(islice(waiting, 1), None)) is not None:
            self.started += 1
            thread = greenlet.greenlet(found)
            thread.gr_context = copy_context()
            member = _Member(thread, torch.get_rng_state())
            self._members.append(member)
            self._resume(member)
        return bool(self._members)

    def _step(self) -> None:
        """Have those go on who are the furthest behind, or begin a pass where all are ready for one."""
        inside = [member for member in self._members if member.wants is not None]
        if not inside:
            self.passes += 1
            self._leads = True
            for member in [*self._members]:
                self._resume(member)
            return
        shared = min((member.wants for member in inside if member.wants is not None), key=lambda wants: wants.place)
        together = [member for member in inside if member.wants is shared]
        shared.expect(len(together))
        for member in together:
            self._resume(member)

    def _resume(self, member: _Member, go: Callable[[], object] | None = None) -> None:
        """Let ``member`` go on until it waits again or is done. Raises what its task raises."""
        random, inference = torch.get_rng_state(), torch.is_inference_mode_enabled()
        torch.set_rng_state(member.random)
        self._current = member
        try:
            (go or member.thread.switch)()
        finally:
            self._current = None
            member.random = torch.get_rng_state()
            torch.set_rng_state(random)
            if member.thread.dead:
                self._members.remove(member)
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled() is not inference:
            raise RuntimeError(
                "a call in lockstep turned gradients or inference_mode on, which would hold for the others: enter "
                "torch.inference_mode() around all of them"
            )

    def _dismiss(self) -> None:
        """End what is still under way, as after an error; each task's own clearing up is done."""
        for member in [*self._members]:
            self._resume(member, member.thread.throw)

    def _park(self, wants: Shared | None) -> None:
        """Give the turn back until it is the caller's again."""
        assert self._current is not None
        self._current.wants = wants
        self._current.thread.parent.switch()

    def begin_pass(self) -> bool:
        """Wait until all members are ready for a pass; the first to go on begins it for all."""
        member = self._mine()
        member.depth += 1
        if member.depth > 1:  # a model that calls itself
            return False
        self._park(None)
        member.in_pass = True
        leads, self._leads = self._leads, False
        return leads

    def end_pass(self) -> bool:
        """Note that the caller's pass has ended; the last to say so ends it for all."""
        member = self._mine()
        member.depth -= 1
        if member.depth:
            return False
        member.in_pass = False
        return not any(other.in_pass for other in self._members)

    def wait_for(self, shared: Shared) -> None:
        """Wait until all members who are further behind have come as far."""
        self._mine()
        self._park(shared)

    def _mine(self) -> _Member:
        if self._current is None or greenlet.getcurrent() is not self._current.thread:
            raise RuntimeError("the model was called from outside while calls in lockstep are under way")
        return self._current


def current_call() -> Any:
    """Return what tells calls in lockstep apart: the same for all that one of them does."""
    return greenlet.getcurrent()
