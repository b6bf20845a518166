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
from offstage.stages.dispatch.streaming.waiting_tensor import WaitingTensor
from offstage.stages.plan.request.choose import COPIED_BYTES


class LockstepError(ConfigError, RuntimeError):
    """The model's own code keeps something that calls in lockstep can't each have, for the ``reason`` that is given."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"lockstep: {reason}; make them one after another (generate.lockstep=1)")
        self.reason = reason


_ABSENT = object()
_DATA = (torch.Tensor, int, float, list, tuple, dict)


@dataclass(slots=True, eq=False)
class _Slot:
    """A place in the table of a module, and what stood there at ``first``.

    Where calls change that in place, each has a copy of its own: ``original`` is what was copied.
    """

    table: dict[str, Any]
    name: str
    first: Any
    original: torch.Tensor | None = None

    @property
    def value(self) -> Any:
        return self.table.get(self.name, _ABSENT)

    def put(self, value: Any) -> None:
        if value is _ABSENT:
            self.table.pop(self.name, None)
        else:
            self.table[self.name] = value

    def restore(self) -> None:
        """Put back what stood there, as it was."""
        if self.original is None:
            self.put(self.first)
            return
        if not self.original.is_inference():  # else nobody had it
            self.original.copy_(self.first)
        self.put(self.original)


@dataclass(slots=True, eq=False)
class _Watched:
    """A tensor of the model that calls may change in place, how often that was done, and a copy if it is small."""

    table: dict[str, Any]
    name: str
    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None


Written = dict[_Slot, Any]
"""What a call has written into modules, while others have their turn."""


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
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._slots: dict[tuple[int, str], _Slot] = {}
        self._watched: list[_Watched] = []
        self._streamed: set[tuple[int, str]] = set()
        self._in_call = False
        self._refusal: tuple[Written, str] | None = None  # by whom what can't be copied was changed, and what it is

    def begin(self) -> None:
        """Note from now on what calls write."""
        for table, name, tensor in _tensors(self._model):
            if isinstance(tensor, WaitingTensor) or tensor.is_meta:
                self._streamed.add((id(table), name))
                continue
            copy = tensor.detach().clone() if tensor.nbytes <= COPIED_BYTES else None
            if not tensor.is_inference():
                self._watched.append(_Watched(table, name, tensor, tensor._version, copy))
            elif copy is not None:  # torch doesn't count
                self._slots[id(table), name] = _Slot(table, name, copy, tensor)
        _noting.add(self)

    def end(self) -> None:
        """Put everything back, and note nothing any more."""
        _noting.remove(self)
        with torch.no_grad():
            for slot in self._slots.values():
                slot.restore()
        self._slots.clear()
        self._watched.clear()

    @contextmanager
    def of_one_call(self) -> Iterator[None]:
        """Have what is written inside be gone after it."""
        written: Written = {}
        self.begin()
        self.enter(written)
        try:
            yield
        finally:
            self.leave(written)
            self.end()

    def enter(self, written: Written) -> None:
        """Put in place what a call has ``written``, whose turn it is, unless another has changed what can't be."""
        if self._refusal is not None and self._refusal[0] is not written:
            (_, message), self._refusal = self._refusal, None
            raise LockstepError(message)
        for slot in self._slots.values():
            if slot.original is not None and slot not in written:
                written[slot] = slot.first.clone()
        for slot, value in written.items():
            slot.put(value)
        self._in_call = True

    def leave(self, written: Written) -> None:
        """Take what the call that had its turn has ``written`` out of the modules."""
        self._in_call = False
        changed = [watched for watched in self._watched if watched.tensor._version != watched.version]
        for watched in changed:
            self._have_copied(watched, written)
        for slot in self._slots.values():
            if slot.value is slot.first:
                written.pop(slot, None)
            else:
                written[slot] = slot.value
                slot.put(slot.first)

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
            if key in self._streamed:
                raise LockstepError(
                    f"{self._named(table, name)!r} is streamed, and the model's own code sets it, which would hold for "
                    "the other calls too"
                )
            if key not in self._slots:
                self._slots[key] = _Slot(table, name, table.get(name, _ABSENT))

    def _have_copied(self, watched: _Watched, written: Written) -> None:
        """Have each call have a tensor of its own in the place of one that was changed in place.

        One that can't be copied is refused as soon as it is another call's turn than that of ``written``.
        """
        self._watched.remove(watched)
        if watched.copy is None:
            name = self._named(watched.table, watched.name)
            message = (
                f"the model's own code changes {name!r} in place, {watched.tensor.nbytes} bytes that each call would "
                "need a copy of"
            )
            self._refusal = (written, message)
            return
        key = (id(watched.table), watched.name)
        slot = self._slots.setdefault(key, _Slot(watched.table, watched.name, watched.tensor))
        if slot.first is watched.tensor:
            slot.first, slot.original = watched.copy, watched.tensor

    @cached_property
    def _modules(self) -> set[int]:
        return {id(module) for module in self._model.modules()}

    def _named(self, table: dict[str, Any], name: str) -> str:
        owners = (owner for owner, module in self._model.named_modules() if table in _tables(module))
        return f"{next(owners, '')}.{name}".removeprefix(".")


def _tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return vars(module), module._buffers


def _tensors(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Yield the table, name and value of each attribute and buffer that is a tensor."""
    for table in chain.from_iterable(map(_tables, model.modules())):
        for name, value in table.items():
            if isinstance(value, torch.Tensor):
                yield table, name, value
