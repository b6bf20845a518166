"""Lockstep: several calls of one model go through it together, in one thread of the system.

Each call is an ordinary one, of its own shape and with its own cache, and computes exactly what it computes alone: what
is shared is the weights and not the arithmetic, whose last bits would depend on the batch. One call runs at a time. At
each shared part it stops, and the turn goes on; once all have come as far, the part is brought, used by each in turn,
and let go. Calls join and leave where passes begin. A call may divide into several, which go with all others, and goes
on when they have ended.

A member is a greenlet: a second thread would bring a second team of OpenMP's. Each has random numbers of its own, which
go on from where they were as it began, and a state of the thread, such as autocast; none records gradients.

Where parts of the model are computed by other hosts, calls wait for what these send too, and go in groups, each of them
in lockstep by itself (``lanes``). The turn goes to whoever's input has come; a group keeps it until it must wait. It
waits at what comes first in a pass that one of its calls has yet to come by, in this pass before the next: all hosts
having the same groups, there is always a call that is the furthest behind on all of them, and what it waits for is sent
by a host where it is further on, so it is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import greenlet
import torch

from offstage.pipeline.interpreter import with_frame_room
from offstage.stages.dispatch.streaming.lanes import Grouping, Lanes, Task
from offstage.stages.dispatch.streaming.module_state import ModuleState, Written
from offstage.stages.dispatch.streaming.thread_state import RandomState, ThreadState
from offstage.stages.hosts.wire import Arrival
from offstage.stages.units import Position

UNWANTED: ContextVar[Callable[[], Exception | None]] = ContextVar("UNWANTED", default=lambda: None)
"""What ends the call of this context where its next pass would begin, which a member sets for itself; null: nothing."""


class Shared(Protocol):
    """What members wait for to use it one after another; ``position`` is when it comes in a pass."""

    @property
    def position(self) -> Position:
        """Where it stands in the order of a pass."""

    def expect(self, users: int) -> None:
        """Hear that so many more will use it, before it may be let go."""


WaitFor = Callable[[Shared], None]
"""Returns when it is the caller's turn to use what is shared."""


class Turns:
    """Who may go on: without lockstep, whoever asks. The hooks of a model ask it at each pass and each shared part.

    ``call`` names the call that has its turn, alike on all hosts of a run.
    """

    call: str = ""

    def begin_pass(self) -> bool:
        """Say that a pass of the model is to begin; return whether it is for the caller to begin it."""
        return True

    def end_pass(self) -> bool:
        """Say that the caller's pass has ended well; return whether it is for the caller to end it."""
        return True

    def wait_for(self, shared: Shared) -> None:
        """Return when it is the caller's turn to use ``shared``."""

    def receive(self, arrival: Arrival) -> None:
        """Return when ``arrival`` has come, and it is the caller's turn."""
        arrival.wait_for_any((arrival,))


ALONE = Turns()


@dataclass(slots=True, eq=False)
class Member:
    """One call under way, a greenlet: the state of its random numbers, and what it waits for (null: the next pass).

    ``switch`` of its ``thread`` goes on with it, ``throw`` ends it. ``written`` is what it has written into the modules
    of the model, while others have their turn. One that divides waits for its ``parts``, of which at most ``most`` are
    ``under_way`` at a time; each of them has it as its ``whole``. ``name`` is its ``call``, ``begun`` is how many parts
    it has had.
    """

    thread: greenlet.greenlet
    random: RandomState
    name: str
    group: int
    whole: Member | None = None
    divides: bool = False
    parts: Iterator[Task] = field(default_factory=lambda: iter(()))
    most: int = 0
    under_way: int = 0
    begun: int = 0
    wants: Shared | None = None
    in_pass: bool = False
    depth: int = 0
    written: Written = field(default_factory=dict)


class Lockstep(Turns):
    """Calls that go together, at most ``size`` at a time; ``state`` is what they keep in the modules of the model.

    They are called by their numbers after the ``name`` of all of them. ``failed`` is told which call an error ended,
    and which error; ``ended`` each that is over.

    They are divided as ``grouping`` says. A pass begins as all of a group are ready for it; where another group is in
    one already, all of ``begin`` is called as this one comes to use something instead. ``passes`` counts the passes
    that calls shared.
    """

    def __init__(
        self,
        size: int,
        state: ModuleState,
        *,
        grouping: Grouping | None = None,
        begin: Sequence[Callable[[], object]] = (),
        name: str = "",
        failed: Callable[[str, Exception], None] = lambda call, error: None,
        ended: Callable[[str], None] = lambda call: None,
    ) -> None:
        self._name, self._failed, self._ended = name, failed, ended
        self._size, self._state, self._begin_anew = size, state, begin
        self._grouping = grouping or Grouping()
        self._group = self._using = 0  # which has its turn, and which used something last
        self._outside = ThreadState.current()
        self._members: list[Member] = []
        self._current: Member | None = None
        self._going: deque[Member] = deque()
        self._leads = False
        self.passes = 0

    @property
    def call(self) -> str:  # type: ignore[override]
        """What names the call that has its turn."""
        return self._mine().name

    def run(self, tasks: Iterable[Task | None]) -> None:
        """Call all ``tasks``, whose calls of the model go together. The first error of one ends them all.

        They are asked for as there is room, and may be null, where there is none now; it ends when none is under way.
        """
        self._lanes = Lanes(tasks, size=self._size, grouping=self._grouping)
        self._state.begin()
        try:
            self._admit()
            while (member := self._next()) is not None:
                self._resume(member)
                if not self._going:
                    self._admit()
        except Exception as error:
            for member in self._members:
                self._failed(member.name, error)
            raise
        finally:
            self._dismiss()
            self._state.end()

    def divide(self, tasks: Iterable[Task], *, size: int) -> None:
        """Have the caller, which is in no pass, be all of ``tasks``, at most ``size`` at a time, until they have ended.

        They begin as it is now, with its random numbers too. The first error of one is raised, when all have ended.
        """
        member = self._mine()
        if member.depth:
            raise RuntimeError("a call in lockstep divides inside a pass of the model: end that first")
        errors: list[Exception] = []
        state = ThreadState.current()

        def part(task: Task) -> None:
            try:
                with state.in_place():
                    task()
            except Exception as error:  # noqa: BLE001 - the whole raises it
                self._failed(self.call, error)
                errors.append(error)

        member.divides, member.parts, member.most = True, (partial(part, task) for task in tasks), size
        self._park(member, None)
        if errors:
            raise errors[0]

    def begin_pass(self) -> bool:
        """Wait until all members are ready for a pass; the first to go on begins it for all."""
        member = self._mine()
        member.depth += 1
        if member.depth > 1:  # a model that calls itself
            return False
        self._park(member, None)
        if error := UNWANTED.get()():
            raise error
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
        member = self._mine()
        self._park(member, shared)
        if self._using != member.group:
            self._using = member.group
            for begin in self._begin_anew:
                begin()

    def receive(self, arrival: Arrival) -> None:
        """Wait until ``arrival`` has come; others have their turn meanwhile."""
        if not arrival.has_come:
            self._park(self._mine(), arrival)

    def _admit(self) -> None:
        """Have tasks join as far as there is room, and go on until they call the model."""
        while (newcomer := self._lanes.next()) is not None:
            number, group, task = newcomer
            member = Member(_thread(task), RandomState.current(), f"{self._name}.{number}", group)
            self._join(member, copy_context())
            self._resume(member)

    def _join(self, member: Member, context: Context) -> None:
        member.thread.gr_context = context
        self._members.append(member)

    def _begin_parts(self, whole: Member) -> None:
        """Have parts of ``whole`` join as far as there is room, or have it go on if all have ended."""
        while whole.under_way < whole.most and (task := next(whole.parts, None)) is not None:
            context, name = whole.thread.gr_context, f"{whole.name}.{whole.begun}"
            whole.under_way += 1
            whole.begun += 1
            part = Member(_thread(task), whole.random, name, whole.group, whole, written=dict(whole.written))
            self._join(part, copy_context() if context is None else context.copy())
            self._going.append(part)
        if not whole.under_way:
            self._going.append(whole)

    def _resume(self, member: Member, go: Callable[[], object] | None = None) -> None:
        """Let ``member`` go on until it waits again or is done, with what is its own in place. Raises what its task
        raises.
        """
        random = RandomState.current()
        self._state.enter(member.written)
        member.random.restore()
        self._current = member
        try:
            (go or member.thread.switch)()
        finally:
            self._current = None
            is_over = bool(member.thread.dead)
            if is_over:
                self._members.remove(member)
                self._ended(member.name)
                self._outside.restore()
            member.random = RandomState.current()
            self._state.leave(member.written, is_over=is_over)
            random.restore()
        if member.divides:
            member.divides = False
            self._begin_parts(member)
        elif is_over and member.whole is not None:
            member.whole.under_way -= 1
            self._begin_parts(member.whole)
        elif is_over:
            self._lanes.end(member.group)

    def _dismiss(self) -> None:
        """End what is still under way, as after an error; each task's own clearing up is done.

        What goes wrong as one is ended says nothing of what ended them all, and doesn't keep the others.
        """
        for member in [*self._members]:
            member.divides, member.parts = False, iter(())
            with suppress(Exception):
                self._resume(member, member.thread.throw)

    def _park(self, member: Member, wants: Shared | None) -> None:
        """Give the turn of ``member``, the caller, back until it is its own again."""
        check_gradients()
        member.wants = wants
        with self._outside.in_place():
            member.thread.parent.switch()

    def _mine(self) -> Member:
        if self._current is None or greenlet.getcurrent() is not self._current.thread:
            raise RuntimeError("the model was called from outside while calls in lockstep are under way")
        return self._current

    def _next(self) -> Member | None:
        """Return who goes on now that none does; null where there is no member."""
        if not self._going:
            self._choose()
        return self._going.popleft() if self._going else None

    def _choose(self) -> None:
        """Have those go on of a group who are the furthest behind, or all of it where all are ready for a pass.

        That is the group that had its turn last, or the next one of which somebody's input has come.
        """
        groups: dict[int, list[Member]] = {}
        for member in self._members:
            if not member.under_way:
                groups.setdefault(member.group, []).append(member)
        turns = sorted(groups, key=lambda group: (group < self._group, group))
        while turns:
            missing: list[Arrival] = []
            for group in turns:
                going = self._furthest_behind(groups[group], missing)
                if going:
                    self._group = group
                    self._going.extend(going)
                    return
            missing[0].wait_for_any(missing)

    def _furthest_behind(self, members: Sequence[Member], missing: list[Arrival]) -> list[Member]:
        """Return who goes on of ``members``, a group; what all of it waits for is added to what is ``missing``.

        Who is in a pass is behind those that are in none: what is called before a pass, as an encoder is of a call that
        joins, is of the next one, and other hosts may have it join only when this one is over.
        """
        waiting = [(member, member.wants) for member in members if member.wants is not None]
        if not waiting:
            self.passes += 1
            self._leads = not any(member.in_pass for member in self._members)
            self._using = members[0].group if self._leads else self._using
            return [*members]
        behind = [(member, wants) for member, wants in waiting if member.in_pass] or waiting
        shared = min((wants for _, wants in behind), key=lambda wants: wants.position)
        if not isinstance(shared, Arrival):
            going = [member for member, wants in behind if wants is shared]
            shared.expect(len(going))
            return going
        arrivals = [
            (member, wants)
            for member, wants in behind
            if isinstance(wants, Arrival) and wants.position == shared.position
        ]
        missing.extend(arrival for _, arrival in arrivals if not arrival.has_come)
        return [member for member, arrival in arrivals if arrival not in missing]


def _thread(task: Task) -> greenlet.greenlet:
    """Return what carries ``task`` out; its frames are in pieces of its own, and a model's calls go deep."""
    return greenlet.greenlet(partial(_carry_out, task))


@with_frame_room
def _carry_out(task: Task) -> None:
    task()


def check_gradients() -> None:
    """Refuse a call that records gradients: what it keeps for them would be let go as others have their turn."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a call in lockstep turned gradients on, which none can have there: leave that out of it, or call the "
            "model without lockstep"
        )


def current_call() -> Any:
    """Return what tells calls in lockstep apart: the same for all that one of them does."""
    return greenlet.getcurrent()
