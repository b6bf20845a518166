"""A training step of a model, measured while it runs: bytes in one forward and backward, seconds in another forward.

Counting takes longer than many an operator, so what it counts isn't timed. The model is as it was afterwards: its
gradients, its buffers, the random numbers to come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from offstage.stages.empty_init.fake_weights import unchanged_buffers
from offstage.stages.empty_init.live_storages import CountingMode, LiveStorages
from offstage.stages.empty_init.module_usage import MemoryMeter, ModuleUsage, ModuleWatch, watch_modules
from offstage.stages.empty_init.saved_tensors import SavedStorages
from offstage.stages.empty_init.training_peaks import Loss, run_backward
from offstage.stages.finetune.accelerator_memory import (
    AcceleratorMemory,
    accelerators,
    same_random_numbers,
    wait_for_accelerators,
)

Call = Callable[[nn.Module], Any]


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """What a step took, in bytes: see ``MemoryProfile``; ``usage`` has its modules, with their seconds."""

    usage: Mapping[str, ModuleUsage]
    activation_bytes: int
    gradient_bytes: int
    forward_peak_bytes: int
    peak_bytes: int


def measure_step(model: nn.Module, call: Call, loss: Loss | None) -> MeasuredStep:
    """Run a step and return what it took; ``call`` runs the forward.

    Where accelerators compute, the peaks are those of their allocators, after a first forward that has libraries take
    what they keep. Else storages are counted.
    """
    with _as_it_was(model):
        meter = AcceleratorMemory() if _uses_accelerators(model, call) else None
        measured = _count(model, call, loss, meter)
        timed = ModuleWatch(LiveStorages(), clock=_now)  # of which none are counted
        with watch_modules(model, timed):
            call(model)
    for name, usage in timed.usage.items():
        measured.usage[name].seconds = usage.seconds
    return measured


def _now() -> float:
    """Return the seconds since some moment, with all that was asked of accelerators done."""
    wait_for_accelerators()
    return time.perf_counter()


def _count(model: nn.Module, call: Call, loss: Loss | None, accelerator: MemoryMeter | None) -> MeasuredStep:
    storages = LiveStorages()
    meter = accelerator or storages
    watch = ModuleWatch(meter, clock=lambda: 0.0)
    saved = SavedStorages(storages, lambda: watch.running)
    meter.take_peak()
    before = meter.live
    with CountingMode(storages):
        with saved.hooks(), watch_modules(model, watch):
            output = call(model)
        activations = saved.bytes
        for name, count in saved.bytes_by_module().items():
            watch.usage[name].saved_bytes = count
        run_backward(output, loss)
    forward_peak = watch.usage[""].peak_bytes
    gradients = sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)
    return MeasuredStep(
        watch.usage, activations, gradients, forward_peak, max(forward_peak, meter.take_peak() - before)
    )


def _uses_accelerators(model: nn.Module, call: Call) -> bool:
    """Return whether a forward takes memory of an accelerator."""
    if not accelerators():
        return False
    memory = AcceleratorMemory()
    memory.take_peak()
    before = memory.live
    call(model)
    return memory.take_peak() > before


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Give ``model`` the gradients and the values of its buffers back that it had, and the random numbers."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    model.zero_grad()
    try:
        with unchanged_buffers(model), same_random_numbers():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
