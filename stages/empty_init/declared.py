"""The entries of a quantised checkpoint of which nothing is here but its config, so that it can be planned.

Names and shapes are those that transformers saves the model with, which are the published ones; what each weight rests
as, its config declares. What it doesn't say is said where entries are laid out
(``offstage.stages.checkpoints.quantised``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from offstage.pipeline.errors import CheckpointError, foreign
from offstage.stages.checkpoints.bounds import bounded_in_time
from offstage.stages.checkpoints.checkpoint import Checkpoint
from offstage.stages.checkpoints.converted_modules import converted_modules
from offstage.stages.checkpoints.dtypes import dtype_name
from offstage.stages.checkpoints.extents import Extent, TensorHeader
from offstage.stages.checkpoints.packed import AtRest, memory_file
from offstage.stages.checkpoints.quantised import METHODS
from offstage.stages.checkpoints.quantised_copy import with_copy
from offstage.stages.checkpoints.quantization import method_of
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.empty_init.adapted_model import without_adapter
from offstage.stages.empty_init.names import Naming, name_tensors
from offstage.stages.empty_init.quantisable import multiplied, quantisable

_LINEAR = "Linear"
_SECONDS, _NAME_SECONDS = 2.0, 0.001
"""Of processor time for all names, and beside for each: a hundred patterns are held against one in a few microseconds.
"""
_SIMPLER = "as none does; make its patterns simpler"


@dataclass(frozen=True, slots=True)
class DeclaredCheckpoint:
    """A checkpoint that a config declares, and of its tensors before they were quantised the ``shapes`` and ``naming``:
    to name tens of thousands takes a second.
    """

    checkpoint: Checkpoint
    shapes: Mapping[str, tuple[int, ...]]
    naming: Naming

    def naming_of(self, entries: Mapping[str, AtRest]) -> Naming | None:
        """Return how tensors are made from ``entries``, if they have these names and shapes; else null."""
        return self.naming if self.shapes == {name: entry.shape for name, entry in entries.items()} else None


def declared_checkpoint(
    model: nn.Module, folder: Path, quantization: Mapping[str, object], *, dtype: str, adapted: bool
) -> DeclaredCheckpoint:
    """Return the checkpoint that the config in ``folder`` declares of ``model``, quantised from ``dtype``.

    It has entries and no file: it is to be planned by, and never read. A model that is ``adapted`` is taken without its
    adapter. A ``CheckpointError`` where the config, or the class of the model, doesn't say what the entries are.
    """
    plain, saved, declared = _before(model, folder, adapted=adapted)
    (file,), entries = declared.checkpoint.files, declared.checkpoint.entries
    quantised = _quantised(file.path, plain, entries, naming=declared.naming, quantization=quantization)
    _, declare = METHODS[method_of(quantization)]
    headers: dict[str, TensorHeader] = {}
    for name, header in saved.items():
        at_rest = declare(name, replace(header, dtype=dtype), quantization) if name in quantised else {name: header}
        headers |= at_rest
    return replace(declared, checkpoint=replace(declared.checkpoint, entries=_laid_out(file, headers)))


def declared_copy(model: nn.Module, folder: Path, kind: str, *, adapted: bool) -> DeclaredCheckpoint:
    """Return the plain checkpoint of ``model``, as it rests once it is quantised to ``kind``.

    Else it is as ``declared_checkpoint`` has it. A ``ConfigError`` where no weight can be quantised so.
    """
    plain, _, declared = _before(model, folder, adapted=adapted)
    checkpoint, naming = declared.checkpoint, declared.naming
    chosen = quantisable(plain, naming, checkpoint.entries, kind)
    return replace(declared, checkpoint=with_copy(checkpoint, checkpoint.entries, chosen, kind))


def _before(
    model: nn.Module, folder: Path, *, adapted: bool
) -> tuple[nn.Module, dict[str, TensorHeader], DeclaredCheckpoint]:
    """Return ``model`` without an adapter, what it is saved with, and a checkpoint of that before it is quantised."""
    plain = without_adapter(model).model if adapted else model
    file = ShardFile("config.json", folder / "config.json", 0, None, "")
    with foreign(CheckpointError, f"{file.path}: what a checkpoint of it holds is told by its weights alone"):
        saved = dict(_saved(plain))
    checkpoint = Checkpoint(folder, "safetensors", (file,), _laid_out(file, saved))
    shapes = {name: header.shape for name, header in saved.items()}
    return plain, saved, DeclaredCheckpoint(checkpoint, shapes, name_tensors(plain, checkpoint.entries))


def _saved(model: Any) -> Iterator[tuple[str, TensorHeader]]:
    """Yield the names, shapes and dtypes that ``model`` is saved with; of tied tensors one."""
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    tensors, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            tensors[name] = tensor.detach()
        seen.add(id(tensor))
    if isinstance(model, PreTrainedModel):
        tensors = revert_weight_conversion(model, tensors)
    for name, tensor in tensors.items():
        yield name, TensorHeader(dtype_name(tensor.dtype), tuple(tensor.shape))


def _laid_out(file: ShardFile, headers: Mapping[str, TensorHeader]) -> dict[str, Extent]:
    """Return ``headers`` as extents of ``file``, one after the other; those that have data have it in memory."""
    extents, begin = dict[str, Extent](), 0
    for name, header in headers.items():
        extents[name] = extent = Extent(file, begin, header.dtype, header.shape)
        begin = extent.end
        if header.data:
            extents[name] = replace(extent, file=memory_file(extent, np.frombuffer(header.data, np.uint8)))
    return extents


def _quantised(
    path: Path, model: Any, entries: Mapping[str, Extent], *, naming: Naming, quantization: Mapping[str, object]
) -> set[str]:
    """Return the names of those ``entries`` whose weights ``quantization`` means: of linear layers, and of experts."""
    modules = dict(model.named_modules())
    owners = {
        source: owner
        for step, owner in multiplied(naming, modules)
        for source in step.source_names
        if len(entries[source].shape) > 1
    }
    converts = converted_modules(quantization, _heads(model, modules))
    seconds = _SECONDS + _NAME_SECONDS * len(owners)
    with bounded_in_time(f"{path}: finding the modules that it leaves out", seconds, as_none_does=_SIMPLER):
        return {
            source for source, owner in owners.items() if converts({source.removesuffix(".weight"), owner}, _LINEAR)
        }


def _heads(model: Any, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of what makes the answer of the last state, which stays as it is if nothing else is said."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return [name for name, module in modules.items() if head is not None and module is head]
