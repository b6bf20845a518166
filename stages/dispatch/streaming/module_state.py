"""State that calls keep in the modules of a model, which belongs to each call where several go through it together.

A recurrent layer may keep what it has read in an attribute, a rotary embedding the frequencies of the longest text so
far. Where, shows as it is written: attributes and buffers as they are set, and buffers that are changed in place by
torch's count of the writes to them. A model that writes none has nothing to exchange. Parameters are not looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from offstage.pipeline.errors import ConfigError
from offstage.stages.dispatch.streaming.places import writes_to
from offstage.stages.dispatch.streaming.tensor_copies import LargeCopies, is_large, write_into
from offstage.stages.dispatch.streaming.waiting_tensor import WaitingTensor


class LockstepError(ConfigError, RuntimeError):
    """The model's own code keeps something that calls in lockstep can't each have, for the ``reason`` that is given."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"lockstep: {reason}; make them one after another (generate.lockstep=1)")
        self.reason = reason


_ABSENT = object()
_DATA = (torch.Tensor, int, float, list, tuple, dict)


@dataclass(slots=True, eq=False)
class _Slot:
    """A place in the table of a module, and what stood there at ``first``; ``noted`` is what was set there last.

    Where what stands there ``is_streamed``, the weight that waits gives way to its data for each use: only what was set
    is a call's own.
    """

    table: dict[str, Any]
    name: str
    first: Any
    is_streamed: bool = False
    noted: Any = None

    def own(self) -> Any:
        """Return what the call that has its turn has set here; ``first`` where it has set nothing."""
        value = self.table.get(self.name, _ABSENT)
        return self.first if self.is_streamed and value is not self.noted else value

    def put(self, value: Any) -> None:
        """Have ``value`` stand here."""
        self.noted = value
        if value is _ABSENT:
            self.table.pop(self.name, None)
        else:
            self.table[self.name] = value


@dataclass(slots=True, eq=False)
class _Watched:
    """A tensor of the model that calls may change in place, how often that was done, and a copy if it is small."""

    name: str
    tensor: torch.Tensor
    copy: torch.Tensor | None
    writes: int = 0

    def is_changed(self) -> bool:
        """Return whether something was written to it, as far as torch counts, since it was ``seen``."""
        return self.tensor.is_inference() or writes_to(self.tensor) != self.writes

    def see(self) -> None:
        """Take it as it is."""
        self.writes = writes_to(self.tensor)


Written = dict[_Slot | _Watched, Any]
"""What a call has written into modules, while others have their turn: what it set, and values of what it changed."""


@dataclass(slots=True)
class _Noting:
    """Those that hear what is written into any module, from the first to begin until the last has ended."""

    states: list[ModuleState] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    undo: list[Any] = field(default_factory=list)

    def add(self, state: ModuleState) -> None:
        with self.lock:
            if not self.states:
                self._begin()
            self.states = [*self.states, state]

    def remove(self, state: ModuleState) -> None:
        with self.lock:
            self.states = [other for other in self.states if other is not state]
            while not self.states and self.undo:
                self.undo.pop()()

    def _begin(self) -> None:
        set_attribute, delete = nn.Module.__setattr__, nn.Module.__delattr__

        def note_set(module: nn.Module, name: str, value: Any) -> None:
            self._note(module, name, value)
            set_attribute(module, name, value)

        def note_delete(module: nn.Module, name: str) -> None:
            self._note(module, name, _ABSENT)
            delete(module, name)

        def restore() -> None:
            nn.Module.__setattr__, nn.Module.__delattr__ = set_attribute, delete  # type: ignore[method-assign]

        nn.Module.__setattr__, nn.Module.__delattr__ = note_set, note_delete  # type: ignore[assignment,method-assign]
        self.undo = [restore, register_module_buffer_registration_hook(self._note).remove]

    def _note(self, module: nn.Module, name: str, value: Any) -> None:
        for state in self.states:
            state.note(module, name, value)


_noting = _Noting()


class ModuleState:
    """What calls write into the modules of ``model`` from ``begin`` to ``end``, after which all is as before.

    Each begins with what was there then. ``enter`` puts in place what one has written, and ``leave`` takes it out.
    ``idle`` has the files of others that have ended, whose copies may be those that are needed again.
    """

    def __init__(self, model: nn.Module, idle: list[LargeCopies] | None = None) -> None:
        self._model, self._idle = model, [] if idle is None else idle
        self._slots: dict[tuple[int, str], _Slot] = {}
        self._watched: list[_Watched] = []
        self._streamed: dict[tuple[int, str], torch.Tensor] = {}
        self._copies = LargeCopies()
        self._in_call = False
        self._refusal: tuple[Written, str] | None = None  # by whom what can't be exchanged was changed, and what it is

    def begin(self) -> None:
        """Note from now on what calls write."""
        self._copies = self._idle.pop() if self._idle else self._copies
        watched: dict[int, _Watched] = {}
        for table, name, tensor in _tensors(self._model):
            if isinstance(tensor, WaitingTensor) or tensor.is_meta:
                self._streamed[id(table), name] = tensor
            elif id(tensor) not in watched:
                copy = None if is_large(tensor) else tensor.detach().clone()
                watched[id(tensor)] = _Watched(name, tensor, copy)
        self._watched = [*watched.values()]
        self._copies.keep([one.tensor for one in self._watched if one.copy is None])
        self._see(all_of_them=True)
        _noting.add(self)

    def end(self) -> None:
        """Put everything back, and note nothing any more."""
        _noting.remove(self)
        try:
            for slot in self._slots.values():
                slot.put(slot.first)
            for watched in self._watched:
                if watched.is_changed():
                    self._put_back(watched)
        finally:
            self._slots.clear()
            self._watched.clear()
            self._streamed.clear()
            self._idle.append(self._copies)

    @contextmanager
    def of_one_call(self) -> Iterator[None]:
        """Have what is written inside be gone after it."""
        written: Written = {}
        self.begin()
        self.enter(written)
        try:
            yield
        finally:
            self._in_call = False
            self.end()

    def enter(self, written: Written) -> None:
        """Put in place what a call has ``written``, whose turn it is, unless another has changed what can't be."""
        if self._refusal is not None and self._refusal[0] is not written:
            (_, message), self._refusal = self._refusal, None
            raise LockstepError(message)
        for place, value in written.items():
            if isinstance(place, _Slot):
                place.put(value)
            else:
                write_into(place.tensor, value)
        self._see()
        self._in_call = True

    def leave(self, written: Written, *, is_over: bool = False) -> None:
        """Take what the call that had its turn has ``written`` out of the modules; the last one if it ``is_over``.

        What is too large to have a copy for each call stays until then, and is no other's to see.
        """
        self._in_call = False
        changed = [watched for watched in self._watched if watched.is_changed()]
        for watched in changed:
            if watched.copy is not None:
                written[watched] = watched.tensor.detach().clone()
            elif not is_over:
                self._refuse(watched, written)
        for watched in self._watched:
            if watched in written or (is_over and watched in changed):
                self._put_back(watched)
        if is_over and self._refusal is not None and self._refusal[0] is written:
            self._refusal = None
        for slot in self._slots.values():
            value = slot.own()
            if value is slot.first:
                written.pop(slot, None)
            else:
                written[slot] = value
                slot.put(slot.first)
        self._see(all_of_them=is_over)

    def note(self, module: nn.Module, name: str, value: Any) -> None:
        """Note that ``value`` is about to be set as ``name`` in ``module``, if a call does so and it is state of it.

        What wasn't there before and isn't data (a flag, a function that was compiled) was done to the module once, for
        all calls.
        """
        if not self._in_call or id(module) not in self._modules:
            return
        if name in module._parameters or name in module._modules or isinstance(value, nn.Parameter | nn.Module):
            return
        before = next((table[name] for table in _tables(module) if name in table), _ABSENT)
        if value is before or (before is _ABSENT and (isinstance(value, bool) or not isinstance(value, _DATA))):
            return
        for table in _tables(module):
            key = (id(table), name)
            if key not in self._slots:
                waiting = self._streamed.get(key)
                first = table.get(name, _ABSENT) if waiting is None else waiting
                self._slots[key] = _Slot(table, name, first, is_streamed=waiting is not None)
            self._slots[key].noted = value

    def _see(self, *, all_of_them: bool = False) -> None:
        """Take tensors as they are; large ones only where they are as they were, else they wait to be put back."""
        for watched in self._watched:
            if all_of_them or watched.copy is not None:
                watched.see()

    def _put_back(self, watched: _Watched) -> None:
        if watched.copy is None:
            self._copies.put_back(watched.tensor)
        else:
            write_into(watched.tensor, watched.copy)

    def _refuse(self, watched: _Watched, written: Written) -> None:
        """Refuse what a call has ``written`` to something large as soon as it is another one's turn."""
        owners = (owner for owner, module in self._model.named_modules() for table in _tables(module)
                  if table.get(watched.name) is watched.tensor)  # fmt: skip
        name = f"{next(owners, '')}.{watched.name}".removeprefix(".")
        message = (
            f"the model's own code changes {name!r} in place, {watched.tensor.nbytes} bytes that each call would "
            "need a copy of"
        )
        self._refusal = (written, message)

    @cached_property
    def _modules(self) -> set[int]:
        return {id(module) for module in self._model.modules()}


def _tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return vars(module), module._buffers


def _tensors(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Yield the table, name and value of each attribute and buffer that is a tensor."""
    for table in chain.from_iterable(map(_tables, model.modules())):
        for name, value in table.items():
            if isinstance(value, torch.Tensor):
                yield table, name, value
