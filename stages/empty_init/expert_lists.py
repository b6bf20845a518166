"""Lists of modules of which a forward calls those that its data choose: the experts of a mixture.

Where a rehearsal had to decide what data decide (see ``deciding``), the lists that it didn't call whole are such. Where
there was none, a list is taken for one by its looks: modules all alike, inside a block that is repeated itself, beside
a matrix with a row or a column for each of them: the router. A decoder's layers are a list too, and a forward calls
them all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import nn

from offstage.stages.empty_init.experts import configured_width
from offstage.stages.empty_init.skeleton import parent


def find_expert_lists(model: nn.Module, called: Collection[str]) -> dict[str, int]:
    """Return, for each list of ``model`` of which a forward that decided ``called`` some only, how many those are."""
    lists = {name: [f"{name}.{key}" for key, _ in members] for name, members in _lists(model)}
    counts = {name: sum(member in called for member in members) for name, members in lists.items()}
    return {name: count for name, count in counts.items() if 0 < count < len(lists[name])}


def guess_expert_lists(model: nn.Module) -> dict[str, int]:
    """Return the lists of ``model`` that look like routed experts, and how many a token uses, as its config says.

    Where that says nothing, it is taken to use all.
    """
    config = getattr(model, "config", None)
    nested = ((name, members) for name, members in _lists(model) if any(map(str.isdigit, name.split("."))))
    return {
        name: configured_width(config, len(members))
        for name, members in nested
        if _has_router(model.get_submodule(parent(name)), [module for _, module in members])
    }


def _lists(model: nn.Module) -> Iterator[tuple[str, list[tuple[str, nn.Module]]]]:
    """Yield the lists that have two modules with weights or more, all of them alike: their names, and these modules."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            members = [child for child in module.named_children() if any(True for _ in child[1].parameters())]
            looks = {(type(child), *(tensor.shape for tensor in child.parameters())) for _, child in members}
            if len(members) > 1 and len(looks) == 1:
                yield name, members


def _has_router(block: nn.Module, experts: Sequence[nn.Module]) -> bool:
    """Return whether ``block`` has a matrix of a row, or a column, for each of ``experts`` beside them."""
    inside = {id(tensor) for expert in experts for tensor in expert.parameters()}
    beside = (tensor for tensor in block.parameters() if id(tensor) not in inside)
    return any(tensor.dim() == 2 and len(experts) in tensor.shape for tensor in beside)
