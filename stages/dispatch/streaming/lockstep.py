"""Lockstep: several calls of one model, in one thread of the system, go through it together.

A member is a greenlet: a second thread would bring a second team of OpenMP's. Each has random numbers of its own, which
go on from where they were as it began, and a state of the thread, such as autocast; none records gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from itertools import islice

import greenlet
import torch

from offstage.stages.dispatch.streaming.module_state import ModuleState
from offstage.stages.dispatch.streaming.thread_state import ThreadState
from offstage.stages.dispatch.streaming.turns import Group, Member, Shared, check_gradients

Task = Callable[[], object]


@dataclass(slots=True, eq=False, kw_only=True)
class _Greenlet(Member):
    """A member that is a greenlet: ``switch`` goes to it, ``throw`` ends it."""

    thread: greenlet.greenlet


class Lockstep(Group):
    """Calls that are made in lockstep, at most ``size`` at a time."""

    def __init__(self, size: int, state: ModuleState) -> None:
        super().__init__(state)
        self._size = size
        self._outside = ThreadState.current()

    def run(self, tasks: Iterable[Task]) -> None:
        """Call all ``tasks``, whose calls of the model go together. The first error of one ends them all."""
        waiting = iter(tasks)
        self._state.begin()
        try:
            self._admit(waiting)
            while (member := self._next()) is not None:
                self._resume(member)
                if not self._going:
                    self._admit(waiting)
        finally:
            self._dismiss()
            self._state.end()

    def _admit(self, waiting: Iterator[Task]) -> None:
        """Have tasks join as far as there is room, and go on until they call the model."""
        while len(self._members) < self._size and (found := next(islice(waiting, 1), None)) is not None:
            self.started += 1
            thread = greenlet.greenlet(found)
            thread.gr_context = copy_context()
            member = _Greenlet(torch.get_rng_state(), thread=thread)
            self._members.append(member)
            self._resume(member)

    def _resume(self, member: Member, go: Callable[[], object] | None = None) -> None:
        """Let ``member`` go on until it waits again or is done. Raises what its task raises."""
        assert isinstance(member, _Greenlet)
        random = torch.get_rng_state()
        self._take_up(member)
        self._current = member
        try:
            (go or member.thread.switch)()
        finally:
            self._current = None
            if member.thread.dead:
                self._members.remove(member)
                self._outside.restore()
            self._put_down(member, is_over=member.thread.dead)
            torch.set_rng_state(random)

    def _dismiss(self) -> None:
        """End what is still under way, as after an error; each task's own clearing up is done.

        What goes wrong as one is ended says nothing of what ended them all, and doesn't keep the others.
        """
        for member in [*self._members]:
            assert isinstance(member, _Greenlet)
            with suppress(Exception):
                self._resume(member, member.thread.throw)

    def _park(self, member: Member, wants: Shared | None) -> None:
        assert isinstance(member, _Greenlet)
        check_gradients()
        member.wants = wants
        with self._outside.in_place():
            member.thread.parent.switch()

    def _is_mine(self, member: Member) -> bool:
        return isinstance(member, _Greenlet) and greenlet.getcurrent() is member.thread
