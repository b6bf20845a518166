"""Parameters that are one tensor under several names."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offstage.stages.empty_init.skeleton import longest_prefix

_log = logging.getLogger(__name__)


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the groups of names that share one parameter, each sorted, in the order of their first names.

    A parameter assigned to two modules and a submodule bound under two names are found alike, on any device, meta
    included: what counts is that the names lead to one ``Parameter`` object. Other arguments change nothing.

    >>> model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    >>> model.head.weight = model.embed.weight
    >>> find_tied_parameters(model)
    [['embed.weight', 'head.weight']]
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Make each group of names in ``tied_params`` one parameter again, in place.

    The one that holds data (is not on the meta device) is bound under all names of its group; a group that has none
    is tied on meta.

    >>> model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    >>> retie_parameters(model, [["embed.weight", "head.weight"]])
    >>> model.head.weight is model.embed.weight
    True
    """
    for group in tied_params:
        bound = [model.get_parameter(name) for name in group]
        shared = next((parameter for parameter in bound if parameter.device.type != "meta"), bound[0])
        for name in group:
            owner, _, attribute = name.rpartition(".")
            model.get_submodule(owner).register_parameter(attribute, shared)


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and value of every parameter, then of every buffer, of ``module``.

    With ``recurse`` those of its submodules too; with ``remove_non_persistent`` without the buffers that a state dict
    leaves out.

    >>> [name for name, _ in named_module_tensors(nn.BatchNorm1d(4, affine=False))]
    ['running_mean', 'running_var', 'num_batches_tracked']
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    hidden = non_persistent_buffers(module, recurse=recurse) if remove_non_persistent else set()
    yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if name not in hidden)


def non_persistent_buffers(module: nn.Module, *, recurse: bool = True) -> set[str]:
    """Return the dotted names of the buffers that a state dict of ``module`` leaves out."""
    owners = module.named_modules(remove_duplicate=False) if recurse else [("", module)]
    return {
        f"{prefix}.{name}" if prefix else name for prefix, owner in owners for name in owner._non_persistent_buffers_set
    }


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Sequence[str]], device_map: Mapping[str, int | str | torch.device]
) -> None:
    """Log a warning for each group of names in ``tied_params`` that ``device_map`` puts on different devices.

    A name goes by its longest prefix in the map. One that has none follows its twins; a group without any is a
    ``ValueError``.

    >>> check_tied_parameters_on_same_device([["embed.weight", "head.weight"]], {"": "cpu"})
    """
    for group in tied_params:
        devices = {
            name: device_map[prefix] for name in group if (prefix := longest_prefix(name, device_map)) is not None
        }
        if not devices:
            raise ValueError(f"device_map: leaves out {group[0]!r}; map it, or '' for all that is not mapped")
        if len(set(devices.values())) > 1:
            _log.warning("one tied tensor is mapped to several devices, give its names the same: %s", devices)
