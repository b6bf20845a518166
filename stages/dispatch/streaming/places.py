"""The places in a model where streamed tensors are bound for each use, and what stands there between uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from offstage.stages.checkpoints.packed import AtRest
from offstage.stages.dispatch.streaming.waiting_tensor import (
    WaitingSource,
    WaitingTensor,
    bring_home,
    rebuild,
    send_waiting,
)
from offstage.stages.machine.aligned_memory import HostBlock

_SUBMODULES: Callable[[nn.Module], dict[str, object]] = attrgetter("_modules")
_PARAMETERS: Callable[[nn.Module], dict[str, object]] = attrgetter("_parameters")
_VALUES = methodcaller("values")


@dataclass(slots=True)
class TensorPlace:
    """Where a tensor of a model stands: as ``attribute`` in the ``table`` of its module; ``name`` is its name there, or
    in the model.

    ``before`` stands there between uses, ``bound`` in a use, null where there is none; ``version`` counts the writes to
    it by then. A tensor that somebody else puts there is left alone. Of one that streams, ``host`` has the data where
    that waits on the host, and ``at`` is where it rests in one piece on disk.
    """

    name: str
    table: dict[str, Any]
    attribute: str
    before: torch.Tensor
    host: torch.Tensor | None = None
    at: AtRest | None = None
    bound: torch.Tensor | None = field(default=None, repr=False)
    version: int = 0
    module: nn.Module | None = field(default=None, repr=False)

    @property
    def now(self) -> torch.Tensor | None:
        """What stands there now, whoever put it there."""
        return self.table.get(self.attribute)

    @property
    def is_written(self) -> bool:
        """Whether something was written into what is bound since it was."""
        return self.bound is not None and writes_to(self.bound) != self.version

    def bind(self, tensor: torch.Tensor) -> None:
        """Put ``tensor`` there, until ``leave``."""
        self.table[self.attribute] = self.bound = tensor
        self.version = writes_to(tensor)

    def bind_data(self, data: torch.Tensor) -> None:
        """Put ``data`` in the place of what waits, as a parameter like it where that is one.

        One that would learn is none in a call with gradients: a graph would keep it, and its gradient would be lost.
        One that is parametrised is read by whatever makes of it what is used. Where what waits was taken out of its
        module else, what was made of it is in memory: a ``RuntimeError``.
        """
        if self.attribute not in self.table:
            if self.module is not None and is_parametrized(self.module, self.attribute):
                return
            raise RuntimeError(
                f"{self.name!r} is streamed, and was taken out of its module, as torch.nn.utils.prune and weight_norm "
                "do: do that before the model is dispatched, or load what the plain model saves after it"
            )
        if self.now is self.before:
            data = data.data  # its own count of writes: the staging memory around it is written all the time
            learns = torch.is_grad_enabled() and self.before.requires_grad
            self.bind(read_only(self.before, data, self.name) if learns else rebuild(self.before, data))

    def leave(self) -> bool:
        """Put back what was there before; return whether what was bound still was there."""
        was_there = self.bound is not None and self.now is self.bound
        if was_there:
            self.table[self.attribute] = self.before
        self.bound = None
        return was_there

    def settle(self, tensor: torch.Tensor) -> None:
        """Have ``tensor`` stand there between uses."""
        self.table[self.attribute] = self.before = tensor

    def come_home(self) -> None:
        """Have what waits there now be in memory again, where it was; one that never was goes on waiting."""
        now = self.now
        if isinstance(now, WaitingTensor):
            self.settle(bring_home(now))

    def move(self, device: torch.device) -> None:
        """Have what stands there now lie on ``device``; nothing where it was taken out of its module."""
        now = self.now
        if now is not None:
            self.settle(rebuild(now, now.detach().to(device)))


def places_in(module: nn.Module, prefix: str = "") -> Iterator[TensorPlace]:
    """Yield the places of the parameters and buffers of ``module`` itself, named behind ``prefix``."""
    for table in (module._parameters, module._buffers):
        for attribute, tensor in [*table.items()]:
            if tensor is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                yield TensorPlace(name, table, attribute, tensor, module=module)


class _ReadOnly(torch.autograd.Function):
    """The data of a weight as something computed from the weight that waits, whose gradient is refused."""

    @staticmethod
    def forward(ctx: Any, _waiting: torch.Tensor, data: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return data.detach()

    @staticmethod
    def backward(ctx: Any, *_gradient: torch.Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.name!r} is streamed, and its gradient would be lost: what is streamed is read-only; freeze it "
            "(requires_grad_(False)), or keep it where it computes, with a larger max_memory or another device_map"
        )


def read_only(waiting: torch.Tensor, data: torch.Tensor, name: str) -> torch.Tensor:
    """Return ``data`` of the weight ``name`` that waits, as something whose gradient is refused."""
    result: torch.Tensor = _ReadOnly.apply(waiting, data, name)  # type: ignore[no-untyped-call]
    return result


def writes_to(tensor: torch.Tensor) -> int:
    """Return how often something was written into ``tensor``; less than zero where torch doesn't count."""
    return -1 if tensor.is_inference() else tensor._version


def place_of(model: nn.Module, name: str, *, has_data: bool = False, at: AtRest | None = None) -> TensorPlace:
    """Return the place of the tensor ``name`` of ``model``, which ``has_data`` that waits on the host, or rests ``at``
    a place on disk.
    """
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    table: dict[str, Any] = module._parameters if attribute in module._parameters else module._buffers
    waiting = table[attribute]
    return TensorPlace(name, table, attribute, waiting, data_of(waiting) if has_data else None, at, module=module)


class Newcomers:
    """Parameters that have no data and came into ``model`` after this was made: what computes with them is noise.

    It is asked at each pass, and looks at what there is only where modules or parameters aren't those of the last time.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known = {id(tensor) for _, tensor in self._without_data()}
        self._modules: list[nn.Module] = []
        self._seen: list[object] = []

    def check(self) -> None:
        """Raise a ``RuntimeError`` where there is one."""
        there = self._there()
        if self._modules and len(there) == len(self._seen) and all(map(is_, there, self._seen)):
            return
        for name, tensor in self._without_data():
            if id(tensor) not in self._known:
                raise RuntimeError(
                    f"{name!r} is on the meta device and has no data: it was added to the model after it was "
                    "dispatched; add adapters before that, or load it with offstage.load, which tells them where to go"
                )
        self._modules = [*self._model.modules()]
        self._seen = self._there()

    def forget(self) -> None:
        """Hold nothing of the model any more that it doesn't."""
        self._modules, self._seen = [], []

    def _there(self) -> list[object]:
        """Return what the modules hold that were there the last time: modules, and parameters."""
        tables = chain(map(_SUBMODULES, self._modules), map(_PARAMETERS, self._modules))
        return [*chain.from_iterable(map(_VALUES, tables))]

    def _without_data(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and value of every parameter that is on meta and waits nowhere."""
        for prefix, module in self._model.named_modules():
            for name, tensor in module._parameters.items():
                if tensor is not None and not isinstance(tensor, WaitingTensor) and tensor.is_meta:
                    yield f"{prefix}.{name}" if prefix else name, tensor


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the data of one that is in a model: itself, or what a waiting one keeps."""
    data = tensor.kept if isinstance(tensor, WaitingTensor) else None
    return tensor if data is None else data


def have_wait(place: TensorPlace, stored: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Bind a tensor in ``place`` that reads itself, to ``device``, where code uses it and doesn't call its module.

    ``stored`` has what waits on disk. A tensor that waits already goes on as it does.
    """
    if not isinstance(place.before, WaitingTensor):
        place.settle(send_waiting(place.before, _source_of(place, stored, device), keep=True))


def have_wait_for(
    place: TensorPlace, stored: Mapping[str, torch.Tensor], device: torch.device, kind: type[WaitingTensor], use: object
) -> None:
    """Bind a ``kind`` of waiting tensor in ``place``, for ``device``: by its ``use`` it needn't be read whole."""
    waiting = kind(place.before, _source_of(place, stored, device), use)
    waiting.kept = place.before
    place.settle(waiting)


def _source_of(place: TensorPlace, stored: Mapping[str, torch.Tensor], device: torch.device) -> WaitingSource:
    """Return where the data of ``place`` waits, for ``device``: in ``stored`` on disk, or on the host."""
    weights = stored if place.host is None else {place.name: place.host}
    return WaitingSource(weights, place.name, device, reported=device)


def gather_on_host(places: Sequence[TensorPlace], host: HostBlock | None) -> list[HostBlock]:
    """Have everything that waits in ``places`` on the host wait in blocks of memory, and return these.

    They are ``host``, if anything lies there, and one for what lay elsewhere, which moves. What was one tensor in two
    places stays one.
    """
    data = {id(place.host): place.host for place in places if place.host is not None}
    strays = {key: tensor for key, tensor in data.items() if host is None or tensor not in host}
    block = HostBlock([tensor.nbytes for tensor in strays.values()])
    moved = {key: rebuild(tensor, block.hold(tensor.detach())) for key, tensor in strays.items()}
    for place in places:
        if id(place.host) in moved:
            _move(place, moved[id(place.host)])
    blocks = [host] if host is not None and len(strays) < len(data) else []
    return blocks + ([block] if strays else [])


def _move(place: TensorPlace, tensor: torch.Tensor) -> None:
    """Have the data of ``place`` be ``tensor``, where it was moved to."""
    place.host = tensor
    if isinstance(place.before, WaitingTensor):
        place.before.keep(tensor)
    else:
        place.settle(tensor)
