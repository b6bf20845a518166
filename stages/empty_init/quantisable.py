"""Which weights of a plain checkpoint the key ``model.quantize`` means: the rule, and the checkpoint with these so.

Quantised are the matrices of linear layers and of experts in the layers that repeat, as vLLM's and transformers' own
quantisers have it: embeddings, norms, biases, heads and whatever else stands once before or after these layers stay as
they are, for they are little of a large model and cost the most. So do routers, whose last bits choose experts, and
weights that the model's class keeps in float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import nn

from offstage.pipeline.errors import ConfigError
from offstage.stages.checkpoints.checkpoint import Checkpoint
from offstage.stages.checkpoints.codecs.quantisers import FLOATS, QUANTISERS
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.quantised_copy import with_copy
from offstage.stages.checkpoints.readers import open_reader
from offstage.stages.empty_init.adapted_model import without_adapter
from offstage.stages.empty_init.experts import is_experts
from offstage.stages.empty_init.merges import sources_in_order
from offstage.stages.empty_init.model import kept_in_float32
from offstage.stages.empty_init.names import Naming, NamingStep, name_tensors
from offstage.stages.empty_init.skeleton import parent, upward

KEY = "model.quantize"


def as_quantised(model: nn.Module, checkpoint: Checkpoint, kind: str, *, adapted: bool) -> Checkpoint:
    """Return the plain ``checkpoint`` of ``model`` with those weights that are meant as they rest in ``kind``.

    A model that is ``adapted`` is taken without its adapter. A ``ConfigError`` where no weight can be quantised so.
    """
    plain = without_adapter(model).model if adapted else model
    entries = plain_entries(checkpoint)
    return with_copy(checkpoint, entries, quantisable(plain, name_tensors(plain, entries), entries, kind), kind)


def plain_entries(checkpoint: Checkpoint) -> dict[str, Extent]:
    """Return the tensors of a plain ``checkpoint``; those of pickles, whose places in a file aren't known, too."""
    entries = checkpoint.entries if checkpoint.tells_places else open_reader(checkpoint).entries
    return {name: entry for name, entry in entries.items() if isinstance(entry, Extent)}


def quantisable(model: nn.Module, naming: Naming, entries: Mapping[str, Extent], kind: str) -> frozenset[str]:
    """Return the names of those ``entries`` of the checkpoint of ``model`` that are quantised to ``kind``.

    A ``ConfigError`` where there are none.
    """
    modules, fits = dict(model.named_modules()), QUANTISERS[kind].fits
    repeated = {
        name for name in modules if any(isinstance(modules[above], nn.ModuleList) for above in upward(parent(name)))
    }
    routers, in_float32 = set(_routers(modules, repeated)), kept_in_float32(model)
    quantised = set[str]()
    for step, owner in multiplied(naming, modules):
        stays = (
            owner not in repeated
            or owner in routers
            or any(in_float32 and in_float32.search(name) for name in step.targets)
        )
        if not stays and sources_in_order(step, entries):  # what is made anew of several would rest unpacked
            quantised |= {name for name in step.source_names if fits(entries[name].header)}
    if not quantised:
        raise ConfigError(
            f"{KEY}: {kind!r} is of no use, no linear layer that repeats in {type(model).__name__} has rows of "
            f"{', '.join(FLOATS)} in whole blocks of 32; leave it null"
        )
    return frozenset(quantised)


def multiplied(naming: Naming, modules: Mapping[str, nn.Module]) -> Iterator[tuple[NamingStep, str]]:
    """Yield each step that makes a weight of a linear layer, or of experts, and the name of these among ``modules``."""
    for step in naming.steps:
        owner = next(filter(None, (_owner(target, modules) for target in step.targets)), None)
        if owner is not None:
            yield step, owner


def _owner(target: str, modules: Mapping[str, nn.Module]) -> str | None:
    name, _, attribute = target.rpartition(".")
    module = modules.get(name)
    if isinstance(module, nn.Linear) and attribute == "weight":
        return name
    return name if module is not None and is_experts(module) and "bias" not in attribute else None


def _routers(modules: Mapping[str, nn.Module], repeated: Collection[str]) -> Iterator[str]:
    """Yield the linear layers of a mixture that have a row for each of its experts, or one for them all.

    Its experts are a stack, or a list of modules within a layer.
    """
    mixtures = {(parent(name), count) for name in repeated if (count := _experts_in(modules[name])) > 1}
    for name in repeated:
        rows = getattr(modules[name], "out_features", 0)
        if rows == 1 or any((above, rows) in mixtures for above in upward(parent(name))):
            yield name


def _experts_in(module: nn.Module) -> int:
    """Return how many experts ``module`` may be: a stack, or a list of modules that hold linear layers."""
    if isinstance(module, nn.ModuleList):
        return len(module)
    return int(getattr(module, "num_experts", 0)) if is_experts(module) else 0
