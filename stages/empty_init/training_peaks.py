"""What a training step holds beside the weights: a forward, a loss and a backward, rehearsed without data or memory.

The rehearsal of ``activation_peaks``, with gradients: every storage is counted from its birth to its death, and what
autograd saves is let go at once and made again when the backward asks for it, as if all of it were offloaded. The
bytes that are away at each moment are those that a step without offload holds there too, so one rehearsal tells the
peak at every ratio. All layers are run, since each adds to what is saved; at one shape, that of the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from offstage.stages.calls.results import named_tensors
from offstage.stages.empty_init.fake_weights import Faking, answered, fake_weights, quiet, swapped, unchanged_buffers
from offstage.stages.empty_init.live_storages import CountingFakes, LiveStorages
from offstage.stages.empty_init.module_usage import ModuleUsage, ModuleWatch, watch_modules
from offstage.stages.empty_init.saved_tensors import DroppedStorages
from offstage.stages.empty_init.step_peaks import Moments, TrainingPeaks

SMALLEST_BYTES = 64
"""What is saved and smaller than this isn't offloaded."""
Call = Callable[[nn.Module], Any]
Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class RehearsedStep:
    """A training step that was rehearsed: its ``peaks``, and the ``usage`` of modules in the forward."""

    peaks: TrainingPeaks
    usage: Mapping[str, ModuleUsage]


def rehearse_step(
    model: nn.Module,
    call: Call,
    *,
    loss: Loss | None = None,
    accumulates: bool = False,
    smallest: int = SMALLEST_BYTES,
) -> RehearsedStep:
    """Rehearse a step of ``model``, whose parameters may be on meta and are counted as if they were on the host.

    ``call`` runs the forward on the module that it is given and returns its output, ``loss`` makes the loss of that
    (see ``run_backward``). One that ``accumulates`` has the gradients of an earlier step. Without gradients (under
    ``torch.no_grad``, or with all weights frozen) it is a forward alone. The model's own mode counts: with
    ``train()`` and checkpointing as it is set. What ``call`` gives it from outside must need no gradients: they would
    be fake. Raises a ``RefusedError`` where its code refuses fake tensors.
    """
    with unchanged_buffers(model), torch.random.fork_rng(devices=()):
        try:
            return answered(partial(_rehearse, model, call, loss, accumulates=accumulates, smallest=smallest))
        finally:
            Faking.cache_clear()


def run_backward(output: Any, loss: Loss | None) -> None:
    """Run the backward pass from ``output``: of its loss, where ``loss`` makes one, or the model itself.

    Else of all that it returns, each with a gradient as large as itself, as any loss would give it. Nothing is done
    where nothing requires gradients.
    """
    loss_value = loss(output) if loss is not None else getattr(output, "loss", None)
    roots = [loss_value] if loss_value is not None else [tensor for _, tensor in named_tensors(output)]
    roots = [tensor for tensor in roots if tensor.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(tensor) for tensor in roots])


class _Moments:
    """The moments of a step, each after an operator, and the meter of its modules: what is held without offload."""

    def __init__(self, storages: LiveStorages) -> None:
        self.storages = storages
        self.saved: DroppedStorages | None = None
        self.in_backward = False
        self.seen: list[tuple[int, int, int]] = []
        self._peak = 0

    @property
    def live(self) -> int:
        """The bytes held now without offload."""
        return self.storages.live + (self.saved.away if self.saved else 0)

    def take_peak(self) -> int:
        """Return the most bytes since this was last asked."""
        peak, self._peak = max(self._peak, self.live), self.live
        return peak

    def note(self) -> None:
        """Add the moment that is now."""
        if self.saved is not None:
            live, saved = self.live, self.saved.bytes
            coming = self.saved.next_bytes if self.in_backward else 0
            self.seen.append((live, saved, saved - self.saved.away + coming))
            self._peak = max(self._peak, live)


def _rehearse(
    model: nn.Module, call: Call, loss: Loss | None, decides: bool, *, accumulates: bool, smallest: int
) -> RehearsedStep:
    """Return what the step takes, see ``rehearse_step``; one that ``decides`` runs code too that asks for values."""
    moments = _Moments(LiveStorages())
    watch = ModuleWatch(moments, clock=lambda: 0.0)
    mode = CountingFakes(moments.storages, moments.note, decides=decides)
    saved = moments.saved = DroppedStorages(mode, lambda: watch.running, smallest=smallest)
    with quiet(), mode, ExitStack() as stack:
        weights = _fake_weights(model, mode, accumulates=accumulates)
        stack.enter_context(swapped(model, weights))
        with saved.hooks(), watch_modules(model, watch):
            output = call(model)
        saved_bytes, passed, moments.in_backward = saved.bytes, len(moments.seen), True
        for name, count in saved.bytes_by_module().items():
            watch.usage[name].saved_bytes = count
        run_backward(output, loss)
        gradients = {id(weight): weight.grad.nbytes for weight in weights.values() if weight.grad is not None}
    forward, backward = _highest(moments.seen[:passed]), _highest(moments.seen[passed:])
    return RehearsedStep(TrainingPeaks(saved_bytes, sum(gradients.values()), forward, backward), watch.usage)


def _fake_weights(model: nn.Module, mode: CountingFakes, *, accumulates: bool) -> dict[str, torch.Tensor]:
    """Return fake weights that require gradients as the model's do, and have some where the step accumulates."""
    with mode.unwatched():
        weights = fake_weights(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        weight = weights[name].requires_grad_(parameter.requires_grad)
        mode.storages.meet(weight, counts=False)
        if accumulates and weight.requires_grad and weight.grad is None:
            weight.grad = torch.empty_like(weight)
    return weights


def _highest(moments: Iterable[tuple[int, int, int]]) -> Moments:
    """Return those of ``moments`` than which no other holds more, both with nothing and with everything offloaded."""
    highest: list[tuple[int, int, int]] = []
    least = -1
    for live, saved, needed in sorted(set(moments), key=lambda moment: (-moment[0], moment[1] - moment[2])):
        if live - saved + needed > least:
            highest.append((live, saved, needed))
            least = live - saved + needed
    return tuple(highest)
