"""Lists of modules of which a forward calls those that its data choose: the experts of a mixture.

Where a rehearsal had to decide what data decide (see ``deciding``), the lists that it didn't call whole are such. Where
there was none, a list is taken for one by its looks: modules all alike, inside a block that is repeated itself, beside
a matrix with a row for each of them: the router. A decoder's layers are a list too, and a forward calls them all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from stages.empty_init.experts import configured_width
from stages.empty_init.skeleton import parent


def find_expert_lists(model: nn.Module, called: Collection[str]) -> dict[str, int]:
    """Return, for each list of ``model`` of which a forward that decided ``called`` some only, how many those are."""
    members = {name: [f"{name}.{child}" for child, _ in experts.named_children()] for name, experts in _lists(model)}
    counts = {name: sum(member in called for member in below) for name, below in members.items()}
    return {name: count for name, count in counts.items() if 0 < count < len(members[name])}


def guess_expert_lists(model: nn.Module) -> dict[str, int]:
    """Return the lists of ``model`` that look like routed experts, and how many a token uses, as its config says.

    Where that says nothing, it is taken to use all.
    """
    config = getattr(model, "config", None)
    nested = ((name, experts) for name, experts in _lists(model) if any(map(str.isdigit, name.split("."))))
    return {
        name: configured_width(config, len(experts))
        for name, experts in nested
        if _has_router(model.get_submodule(parent(name)), experts)
    }


def _lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList | nn.ModuleDict]]:
    """Yield the lists of two modules or more that are all alike and have weights."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) > 1:
            looks = {(type(child), *(tensor.shape for tensor in child.parameters())) for child in module.children()}
            if len(looks) == 1 and len(next(iter(looks))) > 1:
                yield name, module


def _has_router(block: nn.Module, experts: nn.Module) -> bool:
    """Return whether ``block`` has a matrix of a row for each of ``experts`` beside them."""
    inside = {id(tensor) for tensor in experts.parameters()}
    rows = len(list(experts.children()))
    return any(id(tensor) not in inside and tensor.dim() == 2 and len(tensor) == rows for tensor in block.parameters())
