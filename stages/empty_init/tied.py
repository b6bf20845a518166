"""Parameters that are one tensor under several names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the groups of names that share one parameter, each sorted, in the order of their first names.

    A parameter assigned to two modules and a submodule bound under two names are found alike, on any device, meta
    included: what counts is that the names lead to one ``Parameter`` object.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Make each group of names in ``tied_params`` one parameter again, in place.

    The one that holds data (is not on the meta device) is bound under all names of its group; a group that has none
    is tied on meta.
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
