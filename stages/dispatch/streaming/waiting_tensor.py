"""A tensor that waits elsewhere: on meta, yet never uninitialised.

Between calls an offloaded weight is a tensor on the meta device. Code that reads it without calling the module that
owns it (a parent that multiplies by its child's weight) would compute with nothing. This tensor reads itself
when an operator gets it, for that operator alone; so what hooks do in time is speed and never correctness.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self, SupportsIndex

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from offstage.stages.machine.host_memory import PROCESS_BYTES, host_memory

_KEPT = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
_TWIN = "_waiting_twin"
_AS_ARRAY: tuple[Any, ...] = (torch.Tensor.numpy, torch.Tensor.__array__)
_ADDS_BESIDE = "peft."
"""The modules of a library that puts what it adds, and has drawn, to where the weight beside it is."""
_GO_BY_DEVICE = (_ADDS_BESIDE, "trl.", "sentence_transformers.")
"""Those of libraries that move what they compute with a weight to where that says it is."""
_SAVE_IT = "save the model with its save_pretrained(folder), or save what get_state_dict_offloaded_model(model) returns"
_LIKE_ANOTHER: tuple[Any, ...] = (torch.Tensor.to, torch.Tensor.type_as)
_as_parameter: Any = torch.Tensor._make_subclass
"""What a parameter is made by, in a third of the time: each use of a part makes some."""
_SET_DATA: Any = vars(torch._C.TensorBase)["data"].__set__
_SET_LEARNS: Any = vars(torch._C.TensorBase)["requires_grad"].__set__
_SETS_LEARNS: tuple[Any, ...] = (_SET_LEARNS, torch.Tensor.requires_grad_)


@dataclass(slots=True)
class WaitingSource:
    """Where a tensor waits: its ``name`` in the mapping ``weights``; ``device`` is where it is needed.

    Whoever asks a waiting tensor for its device hears ``told``, by default meta. Libraries that add to a model put
    what they add to where its weights are: there it must be a device that computes.
    """

    weights: Mapping[str, torch.Tensor]
    name: str
    device: torch.device | None
    reported: torch.device | None = None

    def read(self) -> torch.Tensor:
        """Return the tensor as it lies in the mapping, which may be anywhere."""
        return self.weights[self.name]


class WaitingTensor(torch.Tensor):
    """The tensor ``like`` while its data is in ``source``: of its shape and dtype, on meta, a parameter if it is one.

    Operators get its data, read at that moment; those that would change it are refused, since the change would be
    lost. ``detach`` and a copy to meta leave it waiting. ``kept`` is the tensor from before, where keeping it costs no
    memory; ``home`` is the device that it was on. ``use`` is what a kind of them is used by without being read whole;
    ``lent`` the data while somebody has its address. ``learns`` is whether it requires gradients, for who asks often. A
    pickle has the data.
    """

    source: WaitingSource
    use: object
    home: torch.device
    kept: torch.Tensor | None
    restored: weakref.ref[torch.Tensor] | None
    lent: torch.Tensor | None
    learns: bool

    @staticmethod
    def __new__(cls, like: torch.Tensor, source: WaitingSource, use: object = None) -> Self:
        """Make the tensor; see the class."""
        on_meta = torch.empty_like(like, device="meta", requires_grad=False)
        waiting = torch.Tensor._make_subclass(cls, on_meta, like.requires_grad)
        waiting.source, waiting.home, waiting.kept, waiting.restored = source, like.device, None, None
        waiting.use, waiting.lent, waiting.learns = use, None, like.requires_grad
        waiting._is_param = isinstance(like, nn.Parameter)
        return waiting

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """What its source tells: meta, or the device that computes with it, by which some libraries always go."""
        device = self.source.reported
        if device is None and _name(sys._getframe(1)).startswith(_GO_BY_DEVICE):
            device = self.source.device
        return device or torch.device("meta")

    @property
    def needed_on(self) -> torch.device:
        """The device where it is used, whatever it tells; what it tells, where none is known."""
        return self.source.device or self.device

    def keep(self, tensor: torch.Tensor) -> None:
        """Have ``tensor``, of the same values, be what is read and what comes back."""
        self.kept = tensor
        self.source = WaitingSource(
            {self.source.name: tensor}, self.source.name, self.source.device, self.source.reported
        )

    def now(self, device: torch.device | None) -> torch.Tensor:
        """Return the data on ``device``, in this tensor's dtype; None leaves it where it lies."""
        return self.moved(self.source.read(), device)

    def moved(self, value: torch.Tensor, device: torch.device | None) -> torch.Tensor:
        """Return ``value``, which was read for this tensor, on ``device`` and in this tensor's dtype."""
        dtype = self.dtype if value.is_floating_point() else value.dtype
        return value.detach().to(device=device or value.device, dtype=dtype)

    def _out_of_torch(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what ``func`` makes of the data; an array is read-only, since a change to it would be lost."""
        values = func(self.now(self.source.device).requires_grad_(self.requires_grad), *args, **kwargs)
        if func in _AS_ARRAY:
            values.setflags(write=False)
        return values

    def _refuse_data(self, data: torch.Tensor) -> None:
        """Refuse to be given other data than its own: what comes back, or is read again, would not be that."""
        if data is self:
            return
        attribute = self.source.name.rpartition(".")[2]
        raise RuntimeError(
            f"{self.source.name!r} is offloaded, and data set in its place would be lost; give its module another "
            f"parameter: module.{attribute} = torch.nn.Parameter(values)"
        )

    def _refuse_learning(self) -> None:
        """Refuse to learn with an adapter that is put on: its gradient would be lost in the first step."""
        raise RuntimeError(
            f"{self.source.name!r} streams, and what streams can't learn; take bias='none' for the adapter, or have it "
            "in memory where it computes, with a larger max_memory or an entry of its own in device_map_overrides"
        )

    def _address(self) -> int:
        """Return an address in memory, where the caller takes the device for the host's: that of data read for it.

        Only an entry of a state dict has one, for as long as it is there: whoever compares the addresses of all
        parameters of a model would have them all in memory.
        """
        if self.device.type == "cpu" and not isinstance(self, nn.Parameter):
            self.lent = self.on_host()
            return self.lent.data_ptr()
        if self.device.type != "meta":
            raise RuntimeError(f"{self.source.name!r} is offloaded, and has no address in memory: {_SAVE_IT}")
        return 0

    def on_host(self) -> torch.Tensor:
        """Return the data on the host, for who keeps it there; a ``RuntimeError`` where it hasn't the room."""
        if self.lent is not None:
            return self.lent
        free = host_memory().available_bytes - PROCESS_BYTES
        if self.kept is None and self.nbytes > free:
            raise RuntimeError(
                f"{self.source.name!r} is offloaded, and its {self.nbytes} bytes don't fit beside what is in memory, "
                f"{free} bytes are free: {_SAVE_IT}"
            )
        return self.now(torch.device("cpu"))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "__get__":  # asked at each use of a part
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        # Autocast decides by the device of its arguments, before operators are dispatched: it must see the data.
        if func in _AS_ARRAY or func is torch.Tensor.tolist:
            return args[0]._out_of_torch(func, *args[1:], **(kwargs or {}))
        if func == _SET_DATA:
            return args[0]._refuse_data(*args[1:])
        if func == _SET_LEARNS and args[1] and _name(sys._getframe(1)).startswith(_ADDS_BESIDE):
            args[0]._refuse_learning()
        if func is torch.Tensor.data_ptr:
            return args[0]._address()
        if func in _LIKE_ANOTHER and len(args) > 1 and isinstance(args[1], WaitingTensor):
            return args[0].to(args[1].needed_on, args[1].dtype, *args[2:], **(kwargs or {}))
        if func is torch.Tensor.__getitem__:
            args = (args[0], _index(args[1]))
        properties = func.__name__ in ("__set__", "detach", "requires_grad_")
        with torch._C.DisableTorchFunctionSubclass():
            if not properties and (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled()):
                args, kwargs = tree_map(_data_of, args), tree_map(_data_of, kwargs or {})
            result = func(*args, **(kwargs or {}))
            if func in _SETS_LEARNS:
                args[0].learns = args[0].requires_grad
            return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _KEPT:
            return args[0].again()
        if torch.device("meta") == kwargs.get("device"):
            return func(*tree_map(_meta_of, args), **kwargs)
        if (func is torch.ops.aten.copy_.default and _is_same(*args[:2])) or _is_itself(func, args):
            return args[0]
        _refuse_changes(func, args, kwargs)
        return func(*tree_map(_data_of, args), **tree_map(_data_of, kwargs))

    def as_meta(self) -> torch.Tensor:
        """Return a plain tensor of this one's shape and dtype, on meta."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def again(self) -> Self:
        """Return another tensor that waits as this one does, and is no parameter."""
        return type(self)(self.as_meta(), self.source, self.use)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo and isinstance(self, nn.Parameter) and _is_copied_beside():
            data = self.now(self.source.device).clone()
            memo[id(self)] = nn.Parameter(data, requires_grad=self.requires_grad)
        if id(self) not in memo:
            twin = WaitingTensor(self, copy.deepcopy(self.source, memo))  # no engine knows the copy: it is read whole
            twin.home, twin.kept = self.home, copy.deepcopy(self.kept, memo)
            memo[id(self)] = twin
        copied: torch.Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> Any:
        return rebuild(self, self.on_host()).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"WaitingTensor(name={self.source.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def send_waiting(tensor: torch.Tensor, source: WaitingSource, *, keep: bool) -> WaitingTensor:
    """Return what stands for ``tensor`` while it waits: one and the same for all the modules that it is tied in.

    With ``keep`` the tensor itself is what comes back; without, its data is read again.
    """
    reference = getattr(tensor, _TWIN, None)
    twin: WaitingTensor | None = reference() if reference is not None else None
    if twin is None or twin.source.device != source.device:
        twin = WaitingTensor(tensor, source)
        twin.kept = tensor if keep else None
        setattr(tensor, _TWIN, weakref.ref(twin))
    return twin


def bring_home(waiting: WaitingTensor) -> torch.Tensor:
    """Return the tensor that ``waiting`` stands for, with its data where it was: one for all modules it is tied in.

    One that was never in memory goes on waiting: read at each use, it is slow and right.
    """
    if waiting.kept is None and waiting.home.type == "meta":
        return waiting
    tensor = waiting.restored() if waiting.restored is not None else waiting.kept
    if tensor is None or (waiting.home.type != "meta" and tensor.device != waiting.home):
        tensor = rebuild(waiting, waiting.now(waiting.home))
        waiting.restored = weakref.ref(tensor)
    vars(tensor).pop(_TWIN, None)
    return tensor


def rebuild(like: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return ``data`` as what ``like`` is: a parameter that requires gradients as it does, or a buffer."""
    if isinstance(like, WaitingTensor):
        return _as_parameter(nn.Parameter, data, like.learns) if like._is_param else data
    return _as_parameter(nn.Parameter, data, like.requires_grad) if isinstance(like, nn.Parameter) else data


def state_on_host(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of ``model`` on the host, what waits read from where it waits, tied tensors once.

    The host must have room for it. Tensors that are on meta and wait nowhere stay there.
    """
    read: dict[int, torch.Tensor] = {}
    return {name: _on_host(value, read) for name, value in model.state_dict().items()}


def _on_host(value: Any, read: dict[int, torch.Tensor]) -> Any:
    """Return an entry of a state dict on the host, or as it is if it has no data; ``read`` has what was read before."""
    if not isinstance(value, WaitingTensor):
        return value.to("cpu") if isinstance(value, torch.Tensor) and not value.is_meta else value
    key = id(value.source)
    if key not in read:
        read[key] = value.now(torch.device("cpu"))
    return read[key]


def _data_of(value: Any) -> Any:
    return value.now(value.source.device) if isinstance(value, WaitingTensor) else value


def _index(index: Any) -> Any:
    """Return ``index`` with lists of numbers as tensors: torch makes one where the indexed tensor is, here meta."""
    if isinstance(index, tuple):
        return tuple(map(_index, index))
    is_list = isinstance(index, list) and not any(isinstance(one, torch.Tensor | slice) for one in index)
    return torch.as_tensor(index) if is_list or isinstance(index, bool | np.ndarray) else index


def _is_copied_beside() -> bool:
    """Return whether a library that adds to models makes the deep copy that is under way, to train it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _name(frame).startswith(("copy", "torch.", __name__)):
        frame = frame.f_back
    return _name(frame).startswith(_ADDS_BESIDE)


def _name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_itself(func: Any, args: Any) -> bool:
    """Return whether a tensor is set to be itself, as torch has what it parametrises, where nothing was inverted."""
    return func is torch.ops.aten.set_.source_Tensor and args[0] is args[1]


def _is_same(target: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether a copy of ``values`` to ``target`` would change nothing, as of a state dict that holds both."""
    if not isinstance(target, WaitingTensor) or target.shape != values.shape:
        return False
    own, given = _data_of(target), _data_of(values)
    return not given.is_meta and torch.equal(own, given.to(own.device, own.dtype))


def _meta_of(value: Any) -> Any:
    return value.as_meta() if isinstance(value, WaitingTensor) else value


def _refuse_changes(func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    for argument in func._schema.arguments:
        value = {**given, **kwargs}.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and isinstance(value, WaitingTensor):
            weight = f"module.{value.source.name.rpartition('.')[2]}"
            raise RuntimeError(
                f"{value.source.name!r} is offloaded, and a change by {func} would be lost; give its module a "
                f"parameter in memory first: {weight} = torch.nn.Parameter({weight}.detach().clone())"
            )
