"""Lockstep of threads: each calls the model by itself, and their calls go through it together.

One thread runs at a time from where it joins to where it leaves, and the others wait without using the processor. So
random numbers, which torch has one stream of, are each thread's own here as well.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from offstage.stages.dispatch.streaming.module_state import ModuleState
from offstage.stages.dispatch.streaming.turns import Group, Member, Shared, check_gradients


@dataclass(slots=True, eq=False, kw_only=True)
class _Thread(Member):
    """A member that is a thread, known by its number; it waits until ``turn`` is released."""

    number: int = field(default_factory=threading.get_ident)
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class ThreadLockstep(Group):
    """The threads that have joined. The first error of one ends them all."""

    def __init__(self, state: ModuleState) -> None:
        super().__init__(state)
        self.threads: set[int] = set()
        """The threads whose calls go together now, by their numbers."""
        self._lock = threading.Lock()
        self._random = torch.get_rng_state()
        self._error: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the threads are being ended."""
        return self._error is not None

    def join(self) -> Member:
        """Have the calling thread be a member; it has to ``wait`` then."""
        member = _Thread(self._random.clone())
        with self._lock:
            if any(isinstance(other, _Thread) and other.number == member.number for other in self._members):
                raise RuntimeError("this thread's calls of this model go in lockstep already")
            if not self.started:
                self._state.begin()
            self.started += 1
            self._members.append(member)
            self.threads.add(member.number)
            self._going.append(member)
            if self._current is None:
                self._hand_on()
        return member

    def wait(self, member: Member) -> None:
        """Wait until it is the turn of ``member``, the calling thread. Raises where an error has ended all."""
        assert isinstance(member, _Thread)
        member.turn.acquire()
        self._take_up(member)
        if self._error is not None:
            raise RuntimeError(
                f"another thread's call in lockstep with this one failed: {type(self._error).__name__}: {self._error}"
            ) from self._error

    def leave(self, member: Member, error: BaseException | None) -> bool:
        """Have the calling thread be ``member`` no longer, because of ``error`` if any; return whether it was the last.

        An error ends the others too, as each gets its turn.
        """
        with self._lock:
            self._error = self._error or error
            self._members.remove(member)
            self.threads.remove(threading.get_ident())
            if member in self._going:
                self._going.remove(member)
            if self._current is member:
                self._put_down(member, is_over=True)
                self._hand_on()
            if not self._members:
                self._state.end()
                torch.set_rng_state(self._random)
            return not self._members

    def _park(self, member: Member, wants: Shared | None) -> None:
        check_gradients()
        member.wants = wants
        self._put_down(member)
        with self._lock:
            self._hand_on()
        self.wait(member)

    def _hand_on(self) -> None:
        self._current = self._next()
        if isinstance(self._current, _Thread):
            self._current.turn.release()

    def _is_mine(self, member: Member) -> bool:
        return isinstance(member, _Thread) and threading.get_ident() == member.number
