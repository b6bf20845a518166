"""Where a pass of the model begins and ends, however it ends.

torch runs a module's hooks after an exception, but not after an interrupt (``KeyboardInterrupt`` is none): what was
acquired then stays so. The next pass finds that the one before it never ended.

Threads take turns: what streams is one thread's while it is in a pass, or in a call of a part of the model outside of
all passes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

import torch
from torch import nn

from offstage.pipeline.kept_memory import take_again
from offstage.stages.dispatch.streaming.lanes import Grouping, Task
from offstage.stages.dispatch.streaming.lockstep import ALONE, Lockstep, Shared, Turns
from offstage.stages.dispatch.streaming.module_state import LockstepError, ModuleState
from offstage.stages.dispatch.streaming.pass_lock import PassLock, calls_on
from offstage.stages.dispatch.streaming.tensor_copies import LargeCopies
from offstage.stages.dispatch.streaming.uncompiled import uncompiled
from offstage.stages.hosts.stand_ins import Borders
from offstage.stages.hosts.wire import FailedCallError
from offstage.stages.units import Position

_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
"""What a model is given its tokens as, (sequences, length, …): the first of these."""
_DECODED_AT_ONCE = 16
"""A pass of no more tokens of each sequence is one of decoding, in which some may be guessed."""
_QUEUE = "queue"
_OF_PASSES = ("pass", "after")
"""What calls are named after that no lockstep has: the pass that they make, or the one that they come after."""


class ModelPasses:
    """The passes of ``model``: all of ``begin`` is called before each, all of ``end`` after one that ended well.

    Both are lists that whoever made them may change between passes. ``recover`` is called before the first pass after
    one that was interrupted, and before one where ``is_left`` says that a call outside of all passes was. Calls that go
    together share a pass. Threads have them by turns, by ``lock``. Where it ``reuses`` memory those of a prompt
    take again what they free, as all do that decode.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        begin: Sequence[Callable[[], object]],
        end: Sequence[Callable[[], object]],
        recover: Callable[[], None],
        is_left: Callable[[], bool],
        reuses: bool = False,
    ) -> None:
        self._model, self._begin, self._end = model, begin, end
        self._recover, self._is_left, self._reuses = recover, is_left, reuses
        self._depth, self._ended_well = 0, False  # passes around each other: a model may call itself
        self._calls = 0  # of parts of the model, inside a pass or outside of all
        self.lock = PassLock(model)
        self.turns: Turns = ALONE
        self.borders: Borders | None = None
        # What calls are called, alike on all hosts: those of a queue, those that went together, others by their pass.
        self._queued, self._runs, self._passes = count(), count(), 0
        self._copies: list[LargeCopies] = []  # of buffers, which no call needs now

    def hook(self) -> Iterator[Callable[[], None]]:
        """Hook the model; yield what unhooks it."""
        model = self._model
        yield model.register_forward_pre_hook(uncompiled(self._note_length), with_kwargs=True).remove
        yield model.register_forward_pre_hook(uncompiled(self._before), prepend=True).remove
        yield model.register_forward_hook(uncompiled(self._after)).remove
        yield model.register_forward_hook(uncompiled(self._whatever_happened), always_call=True).remove

    def meet(self, borders: Borders, positions: Mapping[str, Position]) -> None:
        """Have calls wait by turns for what other hosts send at ``borders``, in the order of ``positions``."""
        borders.place(positions)
        borders.wire.call = self._call
        borders.wire.wait = lambda arrival: self.turns.receive(arrival)
        self.borders = borders

    def wait_for(self, shared: Shared) -> None:
        """Return when it is the turn of the caller, one of several calls in lockstep, to use ``shared``."""
        self.turns.wait_for(shared)

    def _call(self) -> str:
        """Return what names the call under way, alike on all hosts; one that is no lockstep's by its pass."""
        inside, after = _OF_PASSES
        return self.turns.call or f"{inside if self._depth else after}.{self._passes}"

    def fail_call(self, error: Exception, call: str | None = None) -> None:
        """Have ``call``, by default the one under way, fail on all hosts that compute it, by ``error``."""
        if self.borders is not None:
            reason = error.reason if isinstance(error, LockstepError) else None
            self.borders.wire.fail(call or self._call(), error, why_not_together=reason)

    def _end_call(self, call: str) -> None:
        """Say that ``call`` is over here, well or not: nothing that other hosts send of it is waited for."""
        if self.borders is not None:
            self.borders.end(call)

    def _grouping(self, *, is_queue: bool) -> Grouping:
        if self.borders is None:
            return Grouping()
        wire = self.borders.wire
        if is_queue:
            return Grouping(None, self._queued)
        return Grouping(wire.hosts if wire.shares else None)

    def go_together(self, tasks: Iterable[Task | None], *, size: int, is_queue: bool = False) -> Lockstep:
        """Call ``tasks``, at most ``size`` at a time, whose passes go together; return what they did.

        A call that is one of several itself is divided into them. The first error of one is raised once all have ended;
        the model is then as before. See ``Lockstep.run`` for tasks that are null: those of a queue, which may come
        earlier on one host than on another.
        """
        if isinstance(self.turns, Lockstep) and self.lock.is_mine():
            self.turns.divide((task for task in tasks if task is not None), size=size)
            return self.turns
        with self.lock.hold():
            name = _QUEUE if is_queue else str(next(self._runs))
            group = self.turns = Lockstep(
                size, self._state(), grouping=self._grouping(is_queue=is_queue), begin=self._begin, name=name,
                failed=lambda call, error: self.fail_call(error, call), ended=self._end_call,
            )  # fmt: skip
            try:
                with torch.no_grad():
                    group.run(tasks)
            except Exception as error:
                if not is_queue:  # those too that have yet to begin here; of a queue they will
                    self.fail_call(error, name)
                if isinstance(error, FailedCallError) and error.hangs_on_lockstep:
                    raise LockstepError(error.reason) from error
                raise
            finally:
                self.turns = ALONE
                if not is_queue:
                    self._end_call(name)
                if self._depth or self._is_left():  # by calls that ended early
                    self._take_back()
        return group

    def alone(self) -> AbstractContextManager[None]:
        """Return a context of calls that keep in the modules of the model nothing that later ones see."""
        return self._state().of_one_call()

    def _state(self) -> ModuleState:
        return ModuleState(self._model, self._copies)

    def enter_call(self, *_: object) -> None:
        """Say that a call of a part of the model begins, once what streams is the calling thread's."""
        self.lock.enter()
        self._calls += 1

    def leave_call(self, *_: object) -> None:
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
        self._copies.clear()  # their file is the other process's
        if not self.lock.is_mine():
            self.turns, self._depth, self._calls = ALONE, 0, 0
        return self.lock.is_mine()

    def _take_back(self) -> None:
        """Take everything back from a pass that was interrupted."""
        self._depth = self._calls = 0
        self._recover()

    def _note_length(self, _module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Have memory be kept for the pass that begins as it needs it: one of decoding, or a longer one."""
        given: Any = next((kwargs[name] for name in _TOKENS if kwargs.get(name) is not None), args[0] if args else None)
        is_sequence = isinstance(given, torch.Tensor) and given.dim() > 1 and not torch.is_grad_enabled()
        decodes = is_sequence and given.shape[1] <= _DECODED_AT_ONCE
        take_again((decodes or self._reuses) and not _has_quantised_cache(kwargs), decodes=decodes)

    def _before(self, _module: nn.Module, _args: Any) -> None:
        self.lock.enter()
        if not self.turns.begin_pass():
            return
        if (self._depth or self._is_left()) and not _is_nested(self._model):
            self._take_back()
        if self.turns is ALONE and not self._depth:
            for what in _OF_PASSES:
                self._end_call(f"{what}.{self._passes}")
            self._passes += 1
        self._depth += 1
        for begin in self._begin:
            begin()

    def _after(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._ended_well = True

    def _whatever_happened(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if not self.lock.is_mine():  # it never began
            return
        well, self._ended_well = self._ended_well, False
        error = sys.exception()
        if not well and self.turns is ALONE and isinstance(error, Exception):
            self.fail_call(error)
        if not self.turns.end_pass():
            return
        self._depth = max(0, self._depth - 1)
        try:
            if well:
                for end in self._end:
                    end()
        finally:
            if not self._depth and not self._calls:
                self.lock.leave(pass_is_over=True)


def _has_quantised_cache(given: Mapping[str, Any]) -> bool:
    """Return whether transformers' cache that rests quantised is among what a model is ``given``, by whatever name.

    Each layer's keys and values are whole for a while with each token: taking again what the one before freed leaves
    ever more unused.
    """
    layers = (getattr(value, "layers", None) for value in given.values())
    return any(isinstance(some, list) and some and hasattr(some[0], "residual_length") for some in layers)


def _is_nested(model: nn.Module) -> bool:
    """Return whether a call of ``model`` is under way around the one that asks."""
    return sum(called is model for called in calls_on(sys._getframe())) > 1
