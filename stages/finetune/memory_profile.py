"""What a training step of a model takes, module by module: measured with data, or rehearsed without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from offstage.pipeline.errors import ConfigError
from offstage.stages.dispatch.streaming.guard import is_guarded
from offstage.stages.empty_init.fake_weights import RefusedError
from offstage.stages.empty_init.module_usage import ModuleUsage
from offstage.stages.empty_init.training_peaks import Loss, RehearsedStep, rehearse_step
from offstage.stages.finetune.module_profile import MemoryProfile, ModuleProfile
from offstage.stages.finetune.step_measurement import MeasuredStep, measure_step
from offstage.stages.units import parse_size


def profile_memory(
    model: nn.Module, *inputs: Any, data: bool = True, loss: Loss | None = None, **kwargs: Any
) -> MemoryProfile:
    """Return what one training step of ``model``, called with ``inputs`` and ``kwargs``, takes.

    ``loss`` makes the loss of what the model returns; by default it is the output's own ``loss``, or all outputs get
    gradients as large as themselves. Under ``torch.no_grad()`` it is a forward alone. The model's mode and its
    checkpointing count as they are set, and models that stream are welcome. It is as it was afterwards.

    On the host bytes are counted as storages: what kernels take inside themselves isn't seen. Where accelerators
    compute, the peaks are those of their allocators, which are set back. Without ``data`` nothing is computed or
    allocated: weights and inputs may be on meta; a ``ConfigError`` where the model's code needs values.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    >>> profile = profile_memory(model, torch.ones(256, 64), data=False)
    >>> profile.activation_bytes, profile.gradient_bytes
    (65536, 33280)
    """
    rehearsed, refusal = _rehearse(model, inputs, kwargs, loss)
    if data:
        given, named = tree_map(_apart, (inputs, kwargs))
        measured = measure_step(model, lambda module: module(*given, **named), loss)
        return _profile(model, measured, rehearsed, refusal, timed=True)
    if rehearsed is None:
        raise ConfigError(
            f"profile_memory: {type(model).__name__} can't be run without data: {refusal}; set data=True, and give it"
            " inputs and weights that have some"
        )
    peaks = rehearsed.peaks
    step = MeasuredStep(rehearsed.usage, peaks.saved_bytes, peaks.gradient_bytes, peaks.forward_peak, peaks.peak())
    return _profile(model, step, rehearsed, None, timed=False)


def least_ratio(profile: MemoryProfile, budget: int | str) -> float:
    """Return the least ratio of activation offload with which a step takes at most ``budget`` beside the weights.

    ``budget`` is in bytes, or text such as ``"2GB"``. Gradients count in it; what an optimizer keeps doesn't. Raises a
    ``BudgetError`` with the least budget that would do where none fits, and a ``ConfigError`` where the profile has no
    prediction.

    >>> model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    >>> profile = profile_memory(model, torch.ones(1024, 64), data=False)
    >>> 0 < least_ratio(profile, "2MB") < 1
    True
    """
    if profile.peaks is None:
        raise ConfigError(
            f"offload_ratio: no ratio can be worked out, since the model can't be traced with fake "
            f"tensors: {profile.unrehearsed}; give a number from 0 to 1"
        )
    return profile.peaks.least_ratio(parse_size(budget))


def _profile(
    model: nn.Module, step: MeasuredStep, rehearsed: RehearsedStep | None, refusal: str | None, *, timed: bool
) -> MemoryProfile:
    """Return the profile of ``step``; what was measured beyond what was rehearsed is predicted at every ratio."""
    peaks = None if rehearsed is None else rehearsed.peaks.lifted(step.peak_bytes - rehearsed.peaks.peak())
    return MemoryProfile(
        tuple(_modules(model, step.usage, timed=timed)),
        parameter_bytes=_parameter_bytes(model),
        activation_bytes=step.activation_bytes,
        gradient_bytes=step.gradient_bytes,
        forward_peak_bytes=step.forward_peak_bytes,
        peak_bytes=step.peak_bytes,
        seconds=step.usage[""].seconds if timed else None,
        peaks=peaks,
        unrehearsed=refusal,
    )


def _modules(model: nn.Module, usage: Mapping[str, ModuleUsage], *, timed: bool) -> Iterator[ModuleProfile]:
    modules = dict(model.named_modules())
    for name, one in usage.items():
        yield ModuleProfile(
            name,
            type(modules[name]).__name__,
            parameter_bytes=_parameter_bytes(modules[name]),
            activation_bytes=one.saved_bytes,
            calls=one.calls,
            inputs=one.inputs,
            outputs=one.outputs,
            peak_bytes=one.peak_bytes,
            seconds=one.seconds if timed else None,
        )


def _parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _rehearse(model: nn.Module, inputs: Any, kwargs: Any, loss: Loss | None) -> tuple[RehearsedStep | None, str | None]:
    """Return a rehearsed step and null, or null and why the model's code refuses one."""
    given, named = tree_map(_on_host, (inputs, kwargs))
    try:
        with _without_hooks(model) if is_guarded(model) else nullcontext():
            return rehearse_step(model, lambda module: module(*given, **named), loss=loss), None
    except RefusedError as refusal:
        return None, str(refusal)


def _apart(value: Any) -> Any:
    """Return ``value``, of a tensor another one on the same memory: gradients stop at it, and are not its own."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _on_host(value: Any) -> Any:
    """Return ``_apart``, or what stands for a tensor that isn't on the host: integers are ones, floats never read."""
    if not isinstance(value, torch.Tensor) or (value.device.type == "cpu" and not value.is_meta):
        return _apart(value)
    stand_in = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")
    if not value.is_floating_point():
        stand_in.fill_(1)
    return stand_in.requires_grad_(value.requires_grad)


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Take the hooks off that bring weights: a rehearsal needs none."""
    tables = [table for module in model.modules() for table in (module._forward_pre_hooks, module._forward_hooks)]
    saved = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, saved, strict=True):
            table.update(hooks)
