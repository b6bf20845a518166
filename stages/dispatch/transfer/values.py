"""Moving values between devices, whatever containers they come in."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import torch

from offstage.stages.empty_init.module_usage import tensors_of


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Collection[str] | None = None,
) -> Any:
    """Return ``tensor``, or whatever holds some, with every tensor in it on ``device``.

    Goes through tuples, named tuples, lists, mappings and dataclasses (transformers' outputs are both), keeps their
    types, and returns what holds no tensor, or is there already, as it is. Entries of a mapping named in
    ``skip_keys`` are left where they are. So is a cache of transformers: each of its layers lies where it is used.
    ``non_blocking`` changes nothing: a copy is waited for wherever whoever reads it next wouldn't.

    >>> send_to_device({"ids": torch.ones(2), "name": "x"}, "meta")["ids"].device
    device(type='meta')
    """
    skipped = (skip_keys,) if isinstance(skip_keys, str) else skip_keys or ()
    return _send(tensor, torch.device(device), skipped)


def _send(value: Any, device: torch.device, skip_keys: Collection[str]) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device, non_blocking=_copies_itself(value, device))
    if isinstance(value, (tuple, list)):
        return _send_sequence(value, device, skip_keys)
    if isinstance(value, Mapping):
        return _send_mapping(value, device, skip_keys)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _send_dataclass(value, device, skip_keys)
    return value


def _copies_itself(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether ``device`` copies ``tensor`` from the host by itself, in its own order of work.

    That is so from pinned memory; between accelerators torch puts every copy into the order of both. To the host a
    copy must be waited for, since there whoever reads it doesn't.
    """
    return device.type != "cpu" and tensor.device.type == "cpu" and tensor.is_pinned()


def first_device(value: Any) -> torch.device | None:
    """Return the device of the first tensor found in ``value``, or None if it holds none."""
    return next((tensor.device for tensor in tensors_of(value)), None)


def _send_sequence(value: Any, device: torch.device, skip_keys: Collection[str]) -> Any:
    items = [_send(item, device, skip_keys) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _send_mapping(value: Any, device: torch.device, skip_keys: Collection[str]) -> Any:
    items = {k: v if k in skip_keys else _send(v, device, skip_keys) for k, v in value.items()}
    if all(items[key] is value[key] for key in items):
        return value
    kind: Any = type(value)
    if dataclasses.is_dataclass(value):
        return kind(**items)
    if not isinstance(value, MutableMapping):
        return kind(items)
    moved = copy.copy(value)  # a defaultdict keeps its factory, a tokenizer's encoding what it knows of its texts
    moved.update(items)
    return moved


def _send_dataclass(value: Any, device: torch.device, skip_keys: Collection[str]) -> Any:
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    moved = _send_mapping(fields, device, skip_keys)
    return value if moved is fields else dataclasses.replace(value, **moved)
