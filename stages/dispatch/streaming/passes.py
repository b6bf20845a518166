"""Where a pass of the model begins and ends, however it ends.

torch runs a module's hooks after an exception, but not after an interrupt (``KeyboardInterrupt`` is none): what was
acquired then stays so. The next pass finds that the one before it never ended.

Threads take turns: what streams is one thread's while it is in a pass, or in a call of a part of the model outside of
all passes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from offstage.stages.dispatch.streaming.lockstep import Lockstep, Task
from offstage.stages.dispatch.streaming.lockstep_threads import ThreadLockstep
from offstage.stages.dispatch.streaming.module_state import ModuleState
from offstage.stages.dispatch.streaming.pass_lock import PassLock, calls_on
from offstage.stages.dispatch.streaming.tensor_copies import LargeCopies
from offstage.stages.dispatch.streaming.turns import ALONE, Member, Turns
from offstage.stages.dispatch.streaming.uncompiled import uncompiled


class ModelPasses:
    """The passes of ``model``: ``begin`` is called before each, ``end`` after one that ended well.

    ``recover`` is called before the first pass after one that was interrupted, and before one where ``is_left`` says
    that a call outside of all passes was. Calls that go together share a pass. Threads have them by turns, by ``lock``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        begin: Callable[[], None],
        end: Callable[[], None],
        recover: Callable[[], None],
        is_left: Callable[[], bool],
    ) -> None:
        self._model, self._begin, self._end = model, begin, end
        self._recover, self._is_left = recover, is_left
        self._depth, self._ended_well = 0, False  # passes around each other: a model may call itself
        self._calls = 0  # of parts of the model, inside a pass or outside of all
        self.lock = PassLock(model)
        self.turns: Turns = ALONE
        self._changing = threading.Condition()  # held while ``turns`` changes
        self._is_forming = False  # a group that waits for its turn to begin
        self._copies: list[LargeCopies] = []  # of buffers, which no call needs now

    def hook(self) -> Iterator[Callable[[], None]]:
        """Hook the model; yield what unhooks it."""
        model = self._model
        yield model.register_forward_pre_hook(uncompiled(self._before), prepend=True).remove
        yield model.register_forward_hook(uncompiled(self._after)).remove
        yield model.register_forward_hook(uncompiled(self._whatever_happened), always_call=True).remove

    def go_together(self, tasks: Iterable[Task], *, size: int) -> Lockstep:
        """Call ``tasks``, at most ``size`` at a time, whose passes go together; return what they did.

        The first error of one is raised once all have ended; the model is then as before.
        """
        self._refuse_second()
        with self.lock.held():
            with self._changing:
                group = self.turns = Lockstep(size, self._state())
            try:
                with torch.no_grad():
                    group.run(tasks)
            finally:
                self._disband(failed=False)
        return group

    def alone(self) -> AbstractContextManager[None]:
        """Return a context of calls that keep in the modules of the model nothing that later ones see."""
        return self._state().of_one_call()

    def _state(self) -> ModuleState:
        return ModuleState(self._model, self._copies)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Have the passes of the calling thread go together with those of all others that are in here too.

        The first error of one is raised, and ends all; the model is then as before.
        """
        group, member = self._join()
        error: BaseException | None = None
        try:
            with torch.no_grad():
                group.wait(member)
                yield
        except BaseException as found:
            error = found
            raise
        finally:
            with self._changing:
                if group.leave(member, error):
                    self._disband(failed=group.has_failed)
                    self.lock.take_back()

    def _join(self) -> tuple[ThreadLockstep, Member]:
        """Have the calling thread be a member of the group that is under way, or of one that begins at its turn."""
        with self._changing:
            self._changing.wait_for(lambda: not (self._is_forming or self._is_failing()))
            if isinstance(self.turns, ThreadLockstep):
                return self.turns, self.turns.join()
            self._refuse_second()
            self._is_forming = True
        group = ThreadLockstep(self._state())
        try:
            self.lock.lend(group.threads)
            with self._changing:
                self.turns = group
                return group, group.join()
        finally:
            with self._changing:
                self._is_forming = False
                self._changing.notify_all()

    def _is_failing(self) -> bool:
        return isinstance(self.turns, ThreadLockstep) and self.turns.has_failed

    def _refuse_second(self) -> None:
        if self.turns is not ALONE and self.lock.is_mine():
            raise RuntimeError("calls of this model in lockstep are under way already: end them first")

    def _disband(self, *, failed: bool) -> None:
        """Have calls go by themselves again, and take back what those that ended early had."""
        with self._changing:
            self.turns = ALONE
            if failed or self._depth or self._is_left():
                self._take_back()
            self._changing.notify_all()

    def enter_call(self) -> None:
        """Say that a call of a part of the model begins, once what streams is the calling thread's."""
        self.lock.enter()
        self._calls += 1

    def leave_call(self) -> None:
        """Say that a call of a part of the model has ended; after one outside of all passes it is others' turn."""
        if not self.lock.is_mine():  # it never began
            return
        self._calls = max(0, self._calls - 1)
        if not self._calls and not self._depth:
            self.lock.leave()

    def start_anew(self) -> bool:
        """Go on in a process that was forked from the one of the passes before: no other thread is here.

        Return whether what is in use is so by the thread that forked; else all of it has to be taken back.
        """
        self.lock.start_anew()
        self._changing, self._is_forming = threading.Condition(), False
        self._copies.clear()  # their file is the other process's
        if not self.lock.is_mine():
            self.turns, self._depth, self._calls = ALONE, 0, 0
        return self.lock.is_mine()

    def _take_back(self) -> None:
        """Take everything back from a pass that was interrupted."""
        self._depth = self._calls = 0
        self._recover()

    def _before(self, _module: nn.Module, _args: Any) -> None:
        self.lock.enter()
        if not self.turns.begin_pass():
            return
        if (self._depth or self._is_left()) and not _is_nested(self._model):
            self._take_back()
        self._depth += 1
        self._begin()

    def _after(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._ended_well = True

    def _whatever_happened(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if not self.lock.is_mine():  # it never began
            return
        well, self._ended_well = self._ended_well, False
        if not self.turns.end_pass():
            return
        self._depth = max(0, self._depth - 1)
        try:
            if well:
                self._end()
        finally:
            if not self._depth and not self._calls:
                self.lock.leave()


def _is_nested(model: nn.Module) -> bool:
    """Return whether a call of ``model`` is under way around the one that asks."""
    return sum(called is model for called in calls_on(sys._getframe())) > 1
