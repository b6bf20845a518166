"""What the calls of each module take: how often, of which shapes, how many bytes, how long.

A module's figures count what is called inside it too, so those of the model are those of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import nn

Shapes = tuple[tuple[int, ...], ...]


class MemoryMeter(Protocol):
    """What tells the bytes that are held."""

    @property
    def live(self) -> int:
        """The bytes held now."""

    def take_peak(self) -> int:
        """Return the most bytes held since this was last asked."""


@dataclass(slots=True)
class ModuleUsage:
    """The calls of one module. ``inputs`` and ``outputs`` are the shapes of the first call's tensors.

    ``saved_bytes`` were saved for the backward pass in its calls; ``peak_bytes`` is the most that a call held over what
    was there before it, what it returned included; ``seconds`` are those of all calls.
    """

    calls: int = 0
    inputs: Shapes = ()
    outputs: Shapes = ()
    saved_bytes: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Frame:
    """A call that runs: what was held before it, the most since, and when it began."""

    name: str
    before: int
    peak: int = 0
    began: float = 0.0


@dataclass(slots=True)
class ModuleWatch:
    """The calls of a model's modules, as ``meter`` and ``clock`` tell them; ``usage`` has those that were called."""

    meter: MemoryMeter
    clock: Callable[[], float]
    usage: dict[str, ModuleUsage] = field(default_factory=dict)
    _frames: list[_Frame] = field(default_factory=list)

    @property
    def running(self) -> frozenset[str]:
        """The modules that are running now."""
        return frozenset(frame.name for frame in self._frames)

    def enter(self, name: str, inputs: Any) -> None:
        """Note that a call of the module ``name`` begins."""
        self._fold()
        usage = self.usage.setdefault(name, ModuleUsage(inputs=shapes_of(inputs)))
        usage.calls += 1
        self._frames.append(_Frame(name, self.meter.live, began=self.clock()))

    def leave(self, output: Any) -> None:
        """Note that the innermost call ends."""
        now = self.clock()
        self._fold()
        frame = self._frames.pop()
        usage = self.usage[frame.name]
        usage.seconds += now - frame.began
        usage.outputs = usage.outputs or shapes_of(output)
        usage.peak_bytes = max(usage.peak_bytes, frame.peak - frame.before)

    def _fold(self) -> None:
        """Tell the calls that run what was held at most since any began or ended."""
        peak = self.meter.take_peak()
        for frame in self._frames:
            frame.peak = max(frame.peak, peak)


@contextmanager
def watch_calls(
    modules: Iterable[tuple[str, nn.Module]],
    enter: Callable[[str, tuple[Any, Any]], object],
    leave: Callable[[Any], object],
) -> Iterator[None]:
    """Have ``enter`` told of each call of ``modules``, by the module's name with the arguments, positional and named,
    and ``leave`` of what it returned, or null where it raised.
    """
    handles = []
    for name, module in modules:

        def begin(_module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            enter(name, (args, kwargs))

        def end(_module: nn.Module, _args: Any, output: Any) -> None:
            leave(output)

        handles += [
            module.register_forward_pre_hook(begin, with_kwargs=True),
            module.register_forward_hook(end, always_call=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def watch_modules(model: nn.Module, watch: ModuleWatch) -> AbstractContextManager[None]:
    """Have ``watch`` see the calls of all modules of ``model``."""
    return watch_calls(model.named_modules(), watch.enter, watch.leave)


def shapes_of(value: Any) -> Shapes:
    """Return the shapes of all tensors in ``value``: arguments or what a module returned."""
    return tuple(tuple(tensor.shape) for tensor in tensors_of(value))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in ``value``, through mappings, sequences and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    for inner in _inside(value):
        yield from tensors_of(inner)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, one.name) for one in fields(value)]
    return value if isinstance(value, (list, tuple)) else ()
