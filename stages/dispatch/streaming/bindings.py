"""The places in a model where streamed tensors are bound for each use, and what stands there between uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offstage.stages.dispatch.streaming.waiting_tensor import (
    WaitingSource,
    WaitingTensor,
    bring_home,
    rebuild,
    send_waiting,
)
from offstage.stages.machine.aligned_memory import HostBlock


@dataclass(slots=True)
class Binding:
    """One streamed tensor: the table of its module that it is bound in, its short name, and what waits there.

    ``host`` has its data where that waits on the host; null where it waits on disk. ``bound`` is what stands in the
    place of what waits, and ``version`` counts the writes to it by then. A tensor that somebody else puts there is left
    alone.
    """

    name: str
    table: dict[str, Any]
    attribute: str
    waiting: torch.Tensor
    host: torch.Tensor | None = None
    bound: torch.Tensor | None = None
    version: int = 0

    @property
    def is_written(self) -> bool:
        """Whether something was written into what is bound since it was."""
        return self.bound is not None and _writes(self.bound) != self.version

    def bind(self, tensor: torch.Tensor) -> None:
        """Put ``tensor`` in the place of what waits, as a parameter like it where that is one.

        One that would learn is none in a call with gradients: a graph would keep it, and its gradient would be lost.
        Where what waits was taken out of its module, what was made of it is in memory: a ``RuntimeError``.
        """
        if self.attribute not in self.table:
            raise RuntimeError(
                f"{self.name!r} is streamed, and was taken out of its module, as torch.nn.utils.prune and weight_norm "
                "do: do that before the model is dispatched, or load what the plain model saves after it"
            )
        if self.table[self.attribute] is self.waiting:
            tensor = tensor.data  # its own count of writes: the staging memory around it is written all the time
            learns = self.waiting.requires_grad and torch.is_grad_enabled()
            self.bound = read_only(self.waiting, tensor, self.name) if learns else rebuild(self.waiting, tensor)
            self.table[self.attribute], self.version = self.bound, _writes(self.bound)

    def unbind(self) -> None:
        """Put what waits back."""
        if self.bound is not None and self.table.get(self.attribute) is self.bound:
            self.table[self.attribute] = self.waiting
        self.bound = None

    def wait_as(self, tensor: torch.Tensor) -> None:
        """Have ``tensor`` be what waits."""
        self.table[self.attribute] = self.waiting = tensor

    def restore(self) -> None:
        """Put back what was there before anything was streamed, as far as it was kept; else what waits stays."""
        waiting, found = self.waiting, self.table.get(self.attribute)
        if found is waiting and isinstance(waiting, WaitingTensor) and waiting.kept is not None:
            self.wait_as(bring_home(waiting))


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
    found: torch.Tensor = _ReadOnly.apply(waiting, data, name)  # type: ignore[no-untyped-call]
    return found


def _writes(tensor: torch.Tensor) -> int:
    """Return how often something was written into ``tensor``, as far as torch counts."""
    return 0 if tensor.is_inference() else tensor._version


def make_binding(model: nn.Module, name: str, *, on_disk: bool) -> Binding:
    """Return the binding of the tensor ``name`` of ``model``, whose data waits on disk, or is in the model."""
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    table: dict[str, Any] = module._parameters if attribute in module._parameters else module._buffers
    waiting = table[attribute]
    return Binding(name, table, attribute, waiting, None if on_disk else data_of(waiting))


def without_data(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and value of every parameter that is on meta and waits nowhere."""
    for prefix, module in model.named_modules():
        for name, tensor in module._parameters.items():
            if tensor is not None and not isinstance(tensor, WaitingTensor) and tensor.is_meta:
                yield f"{prefix}.{name}" if prefix else name, tensor


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the data of one that is in a model: itself, or what a waiting one keeps."""
    kept = tensor.kept if isinstance(tensor, WaitingTensor) else None
    return tensor if kept is None else kept


def have_wait(binding: Binding, stored: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Bind a tensor in ``binding`` that reads itself, to ``device``, where code uses it and doesn't call its module.

    ``stored`` has what waits on disk. A tensor that waits already goes on as it does.
    """
    if not isinstance(binding.waiting, WaitingTensor):
        binding.wait_as(send_waiting(binding.waiting, source_of(binding, stored, device), keep=True))


def source_of(binding: Binding, stored: Mapping[str, torch.Tensor], device: torch.device) -> WaitingSource:
    """Return where the data of ``binding`` waits, for ``device``: in ``stored`` on disk, or on the host."""
    weights = stored if binding.host is None else {binding.name: binding.host}
    return WaitingSource(weights, binding.name, device, told=device)


def settle(bindings: Sequence[Binding], host: HostBlock | None) -> list[HostBlock]:
    """Have everything that waits in ``bindings`` on the host wait in blocks of memory, and return these.

    They are ``host``, if anything lies there, and one for what lay elsewhere, which moves. What was one tensor in two
    bindings stays one.
    """
    data = {id(binding.host): binding.host for binding in bindings if binding.host is not None}
    strays = {key: tensor for key, tensor in data.items() if host is None or tensor not in host}
    block = HostBlock([tensor.nbytes for tensor in strays.values()])
    moved = {key: rebuild(tensor, block.hold(tensor.detach())) for key, tensor in strays.items()}
    for binding in bindings:
        if id(binding.host) in moved:
            _move(binding, moved[id(binding.host)])
    blocks = [host] if host is not None and len(strays) < len(data) else []
    return blocks + ([block] if strays else [])


def _move(binding: Binding, tensor: torch.Tensor) -> None:
    """Have the data of ``binding`` be ``tensor``, where it was moved to."""
    binding.host = tensor
    if isinstance(binding.waiting, WaitingTensor):
        binding.waiting.keep(tensor)
    else:
        binding.wait_as(tensor)
