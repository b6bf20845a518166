"""Where a pass of the model begins and ends, however it ends.

torch runs a module's hooks after an exception, but not after an interrupt (``KeyboardInterrupt`` is none): what was
acquired then stays so. The next pass finds that the one before it never ended.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from stages.dispatch.streaming.lockstep import Lockstep, Task
from stages.dispatch.streaming.lockstep_threads import ThreadLockstep
from stages.dispatch.streaming.turns import ALONE, Turns
from stages.dispatch.streaming.uncompiled import uncompiled


class ModelPasses:
    """The passes of ``model``: ``begin`` is called before each, ``end`` after one that ended well.

    ``recover`` is called before the first pass after one that was interrupted, and before one where ``is_left`` says
    that a call outside of all passes was. Calls that go together share a pass.
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
        self._under_way = self._ended_well = False
        self.turns: Turns = ALONE
        self._changing = threading.Condition()  # held while ``turns`` changes

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
        with self._changing:
            self._refuse_second()
            group = self.turns = Lockstep(size)
        try:
            with torch.no_grad():
                group.run(tasks)
        finally:
            self._disband(failed=False)
        return group

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Have the passes of the calling thread go together with those of all others that are in here too.

        The first error of one is raised, and ends all; the model is then as before.
        """
        with self._changing:
            self._changing.wait_for(lambda: not (isinstance(self.turns, ThreadLockstep) and self.turns.has_failed))
            if not isinstance(self.turns, ThreadLockstep):
                self._refuse_second()
            group = self.turns = self.turns if isinstance(self.turns, ThreadLockstep) else ThreadLockstep()
            member = group.join()
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

    def _refuse_second(self) -> None:
        if self.turns is not ALONE:
            raise RuntimeError("calls of this model in lockstep are under way already: end them first")

    def _disband(self, *, failed: bool) -> None:
        """Have calls go by themselves again, and take back what those that ended early had."""
        with self._changing:
            self.turns = ALONE
            if failed or self._under_way or self._is_left():
                self._under_way = False
                self._recover()
            self._changing.notify_all()

    def _before(self, _module: nn.Module, _args: Any) -> None:
        if not self.turns.begin_pass():
            return
        if (self._under_way or self._is_left()) and not _is_nested(self._model):
            self._recover()
        self._under_way = True
        self._begin()

    def _after(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._ended_well = True

    def _whatever_happened(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        well, self._ended_well = self._ended_well, False
        if not self.turns.end_pass():
            return
        self._under_way = False
        if well:
            self._end()


def _is_nested(model: nn.Module) -> bool:
    """Return whether a call of ``model`` is under way around the one that asks."""
    calls, frame = 0, sys._getframe()
    above: FrameType | None = frame
    while above is not None:
        calls += above.f_code.co_name == "_call_impl" and above.f_locals.get("self") is model
        above = above.f_back
    return calls > 1
