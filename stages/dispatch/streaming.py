"""Streaming: offloaded weights are brought in for each use and let go after it.

Built on torch's native module hooks, so ``forward`` is never replaced and removing the hooks leaves the module as it
was. A release hook is called even when the forward raises.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from stages.dispatch.lookahead import Lookahead, Traffic
from stages.dispatch.memory_map import MappedFile
from stages.dispatch.moving import first_device, send_to_device
from stages.dispatch.score import Part, Score
from stages.dispatch.trace import Trace
from stages.shard_load.devices import Devices
from stages.shard_load.reading import Extent
from stages.units import DeviceId

Io = Literal["direct", "mmap"]


@dataclass(frozen=True, slots=True)
class Slot:
    """One streamed tensor: the table of its module that it is bound in, its short name, and what waits there."""

    name: str
    table: dict[str, Any]
    attribute: str
    waiting: torch.Tensor

    def bind(self, tensor: torch.Tensor) -> None:
        """Put ``tensor`` in the place of what waits, as a parameter where that is one."""
        parameter = isinstance(self.waiting, nn.Parameter)
        self.table[self.attribute] = nn.Parameter(tensor, requires_grad=False) if parameter else tensor

    def unbind(self) -> None:
        """Put what waits back."""
        self.table[self.attribute] = self.waiting


@dataclass(slots=True)
class _Streamed:
    """The streamed tensors of one module: those that wait on the host, those on disk, and how many calls use them.

    They are copied to the device ``execution`` where that is ``apart`` from the host.
    ``number`` is the part's number in the lookahead, null if nothing of it waits on disk.
    """

    name: str
    on_host: list[Slot]
    on_disk: list[Slot]
    execution: DeviceId
    apart: bool
    number: int | None = None
    users: int = 0
    began: float = 0.0


class Streamer:
    """The hooks of one dispatched model, and the lookahead behind them.

    ``extents`` says where each tensor that waits on disk lies; what waits on the host is in the model.
    ``devices`` are those behind the device ids. With ``io`` "mmap" weights that compute on the cpu are
    used where a map of their shard has them; embeddings always are.
    """

    def __init__(
        self,
        model: nn.Module,
        score: Score,
        *,
        extents: Mapping[str, Extent],
        devices: Devices,
        io: Io = "direct",
        trace: Trace | None = None,
    ) -> None:
        self.traffic, self.trace = Traffic(), trace
        self._model, self._extents, self._io = model, extents, io
        self._devices = devices
        self._stack = ExitStack()
        self._mapped: dict[Any, MappedFile] = {}
        if devices.torch_device(score.main_device).type != "cpu":
            self._move_inputs({name: devices.torch_device(device) for name, device in score.entries.items()})
        parts = {name: (part, self._streamed(name, part)) for name, part in score.parts.items() if part.streamed}
        busy = [(part, found) for part, found in parts.values() if found.on_disk or found.on_host]
        streamed = [found for part, found in busy if not self._map(part, found)]
        self._lookahead = self._look_ahead(streamed, score)
        for found in streamed:
            self._stream(found, callers=score.parts[found.name].callers)
        self._mark_passes()

    def remove(self) -> None:
        """Take all hooks off the model; its streamed weights wait where they did, and no file is open."""
        self._stack.close()

    def _streamed(self, name: str, part: Part) -> _Streamed:
        slots = [make_slot(self._model, tensor) for tensor in part.streamed]
        on_disk = [slot for slot in slots if slot.name in self._extents]
        # A buffer that no checkpoint has is where the constructor computed it, whatever the plan says of disk.
        apart = self._devices.is_apart(part.execution)
        on_host = [slot for slot in slots if slot.name not in self._extents and apart]
        return _Streamed(name, on_host, on_disk, part.execution, apart)

    def _map(self, part: Part, streamed: _Streamed) -> bool:
        """Bind a part to a map of its shards for good, if that is how it is to be served; return whether it was."""
        is_lookup = isinstance(self._model.get_submodule(streamed.name), nn.Embedding)
        alone = len(part.callers) == 1
        if streamed.on_host or streamed.apart or not (self._io == "mmap" or (is_lookup and alone)):
            return False
        files: list[MappedFile] = []
        for slot in streamed.on_disk:
            extent = self._extents[slot.name]
            file = self._open_map(extent)
            file.advise([extent], mmap.MADV_RANDOM if is_lookup and self._io != "mmap" else mmap.MADV_WILLNEED)
            slot.bind(file.tensor(extent))
            self._stack.callback(slot.unbind)
            files.append(file)
        self._watch(streamed, files, counted=0 if is_lookup else self._bytes(streamed.on_disk), callers=part.callers)
        return True

    def _open_map(self, extent: Extent) -> MappedFile:
        if extent.file not in self._mapped:
            self._mapped[extent.file] = MappedFile(extent.file)
            self._stack.callback(self._mapped[extent.file].close)
        return self._mapped[extent.file]

    def _watch(self, streamed: _Streamed, files: list[MappedFile], *, counted: int, callers: tuple[str, ...]) -> None:
        """Check the ``files`` of a mapped part before each use, and count its bytes."""

        def check(_module: nn.Module, _args: Any) -> None:
            for file in files:
                file.check()
            self.traffic.streamed_bytes += counted

        for caller in callers:
            module = self._model.get_submodule(caller)
            self._stack.callback(module.register_forward_pre_hook(check, prepend=True).remove)

    def _bytes(self, slots: list[Slot]) -> int:
        return sum(self._extents[slot.name].end - self._extents[slot.name].begin for slot in slots)

    def _look_ahead(self, streamed: list[_Streamed], score: Score) -> Lookahead:
        stored = [found for found in streamed if found.on_disk]
        for number, found in enumerate(stored):
            found.number = number
        numbers = {found.name: number for number, found in enumerate(stored)}
        lookahead = Lookahead(
            [[self._extents[slot.name] for slot in found.on_disk] for found in stored],
            [numbers[name] for name in score.order if name in numbers],
            staging_bytes=score.staging_bytes,
            traffic=self.traffic,
            trace=self.trace,
        )
        self._stack.callback(lookahead.close)
        return lookahead

    def _stream(self, part: _Streamed, *, callers: tuple[str, ...]) -> None:
        """Bring ``part`` in before, and let it go after, each call of the modules ``callers``."""

        def acquire(_module: nn.Module, _args: Any) -> None:
            self._acquire(part)

        def release(_module: nn.Module, _args: Any, _output: Any) -> None:
            self._release(part)

        for caller in callers:
            module = self._model.get_submodule(caller)
            self._stack.callback(module.register_forward_pre_hook(acquire, prepend=True).remove)
            self._stack.callback(module.register_forward_hook(release, always_call=True).remove)

    def _acquire(self, part: _Streamed) -> None:
        if part.users == 0:
            with ExitStack() as undo:  # all or nothing: a read may fail, or the device be full
                tensors = []
                if part.number is not None:
                    tensors = self._lookahead.take(part.number)
                    undo.callback(self._lookahead.let_go, part.number)
                began = time.perf_counter()
                waiting = [*tensors, *(slot.waiting for slot in part.on_host)]
                arrived = [self._devices.put(tensor, part.execution) for tensor in waiting]
                self.traffic.streamed_bytes += sum(slot.waiting.nbytes for slot in part.on_host)
                if part.apart:
                    self.traffic.stall_seconds += time.perf_counter() - began
                    undo.close()  # copied: the staging memory can serve the next part
                undo.pop_all()
            for slot, tensor in zip([*part.on_disk, *part.on_host], arrived, strict=True):
                slot.bind(tensor)
            part.began = time.perf_counter()
        part.users += 1

    def _release(self, part: _Streamed) -> None:
        """Let ``part`` go when its last user leaves; a call whose acquire failed has nothing to release."""
        if part.users == 0:
            return
        part.users -= 1
        if part.users == 0:
            if self.trace is not None:
                self.trace.add(part.name, "compute", part.began)
            for slot in [*part.on_disk, *part.on_host]:
                slot.unbind()
            if part.number is not None and not part.apart:
                self._lookahead.let_go(part.number)

    def _mark_passes(self) -> None:
        """Tell the lookahead where a pass of the model begins, and where one has ended well."""

        def begin(_module: nn.Module, _args: Any) -> None:
            self._lookahead.begin_pass()

        def end(_module: nn.Module, _args: Any, _output: Any) -> None:
            self._lookahead.end_pass()

        self._stack.callback(self._model.register_forward_pre_hook(begin, prepend=True).remove)
        self._stack.callback(self._model.register_forward_hook(end).remove)

    def _move_inputs(self, entries: Mapping[str, torch.device]) -> None:
        """Move the inputs of each entry to its device, and the model's output to where its input was."""
        skip = set(getattr(self._model, "_skip_keys_device_placement", None) or ())

        def align(device: torch.device) -> Callable[..., tuple[Any, Any]]:
            return lambda _module, args, kwargs: (
                send_to_device(args, device, skip_keys=skip),
                send_to_device(kwargs, device, skip_keys=skip),
            )

        def return_home(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            home = first_device((args, kwargs))
            return output if home is None else send_to_device(output, home, skip_keys=skip)

        for name, device in entries.items():
            module = self._model.get_submodule(name)
            self._stack.callback(module.register_forward_pre_hook(align(device), with_kwargs=True).remove)
        self._stack.callback(self._model.register_forward_hook(return_home, with_kwargs=True).remove)


def make_slot(model: nn.Module, name: str) -> Slot:
    """Return the slot of the parameter or buffer ``name`` of ``model``."""
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    table: dict[str, Any] = module._parameters if attribute in module._parameters else module._buffers
    return Slot(name, table, attribute, table[attribute])


def pin_device(model: nn.Module, device: torch.device) -> None:
    """Make ``model.device`` the main device, also where the first parameter is streamed and waits on meta.

    Only models that have such a property are touched: they get a subclass of their class, of the same name.
    """
    kind = type(model)
    if isinstance(getattr(kind, "device", None), property):
        body = {"device": property(lambda self: device), "__module__": kind.__module__, "__doc__": kind.__doc__}
        model.__class__ = type(kind.__name__, (kind,), body)
