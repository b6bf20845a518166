"""Inputs go to where a module computes, and the model's output to where its input was.

What computes on an accelerator has that as the current one meanwhile: torch's own operators go by where their operands
lie, but not all kernels of others do (Triton's, those of the Hub).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from offstage.stages.dispatch.streaming.lockstep import current_call
from offstage.stages.dispatch.transfer.values import first_device, send_to_device
from offstage.stages.machine.devices import current_device, set_current_device


def move_inputs(
    model: nn.Module,
    entries: Mapping[str, torch.device],
    *,
    main: torch.device,
    skip_keys: str | Collection[str] | None = None,
) -> Iterator[Callable[[], None]]:
    """Hook ``model`` so that inputs go to the device of each entry (module name → device); yield what unhooks it.

    What the host computes beside accelerators goes to ``main`` at once: the model's own code, which may add it to
    something else (embeddings of words and of positions), finds it where that is.
    ``skip_keys`` are keyword arguments that aren't moved; by default those that a transformers model declares.
    """
    declared = getattr(model, "_skip_keys_device_placement", None) or ()
    skip = declared if skip_keys is None else skip_keys

    def align(device: torch.device) -> Callable[..., tuple[Any, Any]]:
        return lambda _module, args, kwargs: (
            send_to_device(args, device, skip_keys=skip),
            send_to_device(kwargs, device, skip_keys=skip),
        )

    def bring_back(_module: nn.Module, _args: Any, output: Any) -> Any:
        return send_to_device(output, main, skip_keys=skip)

    homes: dict[object, list[torch.device | None]] = {}  # of the calls under way: one may call the model again

    def note_home(_module: nn.Module, args: Any, kwargs: Any) -> None:
        homes.setdefault(current_call(), []).append(first_device((args, kwargs)))

    def return_home(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
        under_way = homes.pop(current_call(), [])
        home = under_way.pop() if under_way else None  # there is none where the call failed before it was noted
        if under_way:
            homes[current_call()] = under_way
        return output if home is None or output is None else send_to_device(output, home, skip_keys=skip)

    yield model.register_forward_pre_hook(note_home, with_kwargs=True).remove  # where inputs were before they went over
    for name, device in entries.items():
        module = model.get_submodule(name)
        yield module.register_forward_pre_hook(align(device), with_kwargs=True).remove
        yield from _have_current(module, device) if device.type != "cpu" else ()
        if device.type == "cpu" != main.type:
            yield module.register_forward_hook(bring_back).remove
    yield model.register_forward_hook(return_home, with_kwargs=True, always_call=True).remove


def _have_current(module: nn.Module, device: torch.device) -> Iterator[Callable[[], None]]:
    """Have ``device`` be the current accelerator in calls of ``module``; yield what undoes it."""
    before: dict[object, list[int]] = {}  # of the calls under way

    def enter(_module: nn.Module, _args: Any) -> None:
        current = current_device()
        if current is not None and device.index is not None:
            before.setdefault(current_call(), []).append(current)
            set_current_device(device.index)

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        under_way = before.get(current_call())
        if under_way:  # there is none where the call failed before it was noted
            set_current_device(under_way.pop())
        if not under_way:
            before.pop(current_call(), None)

    yield module.register_forward_pre_hook(enter).remove
    yield module.register_forward_hook(leave, always_call=True).remove
