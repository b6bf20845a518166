"""The field's functions for a checkpoint in a model: one file of it, or all.

Names and signatures are those that scripts written against accelerate know.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from offstage.pipeline.errors import ConfigError
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.dtypes import dtype_name, torch_dtype
from offstage.stages.checkpoints.packed import AtRest, PackedTensor
from offstage.stages.checkpoints.readers import open_stored_reader
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.skeleton import Skeleton, TensorSpec, longest_prefix
from offstage.stages.empty_init.tied import check_tied_parameters_on_same_device
from offstage.stages.machine.devices import AnyDevice, device_id, torch_device
from offstage.stages.shard_load.homes import homes_of
from offstage.stages.shard_load.load import Load, check_twins, prepare
from offstage.stages.shard_load.offload_store import OffloadStore, claim
from offstage.stages.shard_load.placed_weights import PlacedWeights, place
from offstage.stages.shard_load.stored_weights import fill_store
from offstage.stages.shard_load.tensor_in_module import torch_type
from offstage.stages.units import CPU, DISK, DeviceId

PathLike = str | os.PathLike[str]
_UNSUPPORTED = {
    "offload_8bit_bnb": "weights are not quantized here",
    "broadcast_from_rank0": "every process loads what it needs itself",
}


def load_state_dict(
    checkpoint_file: PathLike, device_map: Mapping[str, AnyDevice] | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of one weights file by name, each on the device that ``device_map`` gives it.

    A name goes by its longest prefix in the map; one that the map leaves out, or puts on ``disk``, is on the cpu.
    """
    reader = open_stored_reader(open_checkpoint(Path(checkpoint_file)))
    found = {}
    for name, entry in reader.entries.items():
        tensor = reader.read(name, torch_dtype(entry.dtype))
        prefix = longest_prefix(name, device_map or {})
        found[name] = tensor.to(
            torch_device(device_id(device_map[prefix]) if device_map and prefix is not None else CPU)
        )
    return found


def load_checkpoint_in_model(  # the field's signature
    model: nn.Module,
    checkpoint: PathLike,
    device_map: Mapping[str, AnyDevice] | None = None,
    offload_folder: PathLike | None = None,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load ``checkpoint`` (a folder, a weights file or an index) into ``model``, each tensor where the map says.

    Without a map all goes to the cpu; a name that the map leaves out follows one that it is tied to, and of several
    devices for one tied tensor the fastest counts. Tensors mapped to
    ``disk`` become meta tensors in the model; ``offload_folder`` gets an ``index.json`` that says where each can be
    read (``OffloadedWeightsLoader`` does), and the data of those that the checkpoint doesn't hold as they are. Buffers
    go to disk only with ``offload_buffers``. With ``offload_state_dict`` host weights of ``.bin`` files wait on disk
    while the files are read. Parameters require gradients as they did before.

    Floats come in ``dtype``, by default in the model's own; in float16 the modules ``keep_in_fp32_modules`` stay in
    float32. Without ``strict``, tensors that the model has no place for, and those that the checkpoint lacks, are
    warnings in the log that list them; the latter keep their values, or stay on meta if they are there. A ``dtype`` or
    a kind of number that doesn't fit is a ``CheckpointError`` always. ``full_state_dict`` changes nothing: every
    process loads for itself. So ``broadcast_from_rank0`` is refused, and so is ``offload_8bit_bnb``.
    """
    _refuse_unsupported(offload_8bit_bnb=offload_8bit_bnb, broadcast_from_rank0=broadcast_from_rank0)
    skeleton = with_dtype(describe(model, rehearsed=False), dtype, keep_in_fp32_modules or ())
    homes = _homes(skeleton, device_map or {"": CPU}, offload_buffers=offload_buffers)
    source = open_checkpoint(Path(checkpoint))
    load = prepare(model, skeleton, homes=homes, checkpoint=source, strict=strict, partial=not strict)
    load = replace(load, serves_packed=False)  # the field's index of what lies on disk has no word for it
    if load.on_disk and offload_folder is None:
        raise ConfigError("offload_folder: tensors are mapped to disk, and no folder is given to keep their index in")
    folder = None if offload_folder is None else Path(offload_folder)
    fill_model(load, folder, spills=offload_state_dict)


def fill_model(load: Load, folder: Path | None, *, spills: bool) -> PlacedWeights:
    """Fill the model of ``load`` with its weights; those on disk are served from the checkpoint, or from ``folder``.

    The folder gets an index of all of them, and is needed (a ``ConfigError``) for those that the checkpoint doesn't
    hold as they are. With ``spills`` host weights of ``.bin`` files wait on disk while the files are read.
    """
    check_twins(load)
    if load.stored and folder is None:
        raise ConfigError(
            f"offload_folder: {len(load.stored)} tensors on disk are not in the checkpoint as the model needs them, "
            f"{next(iter(load.stored))!r} first; give a folder to write them to"
        )
    stored: Mapping[str, AtRest] = {}
    if folder is not None and load.on_disk:
        store = _claimed(folder, load)
        stored = fill_store(load, store)
        store.refer(_references(load))
    spills = spills and load.checkpoint.format == "bin"
    return place(load, stored, spill_folder=(folder or Path.cwd()) if spills else None)


def _refuse_unsupported(**options: bool) -> None:
    for name, value in options.items():
        if value:
            raise ConfigError(f"{name}: {value!r} is not supported: {_UNSUPPORTED[name]}; leave it out")


def with_dtype(skeleton: Skeleton, dtype: torch.dtype | str | None, kept: Sequence[str]) -> Skeleton:
    """Return ``skeleton`` with its floats in ``dtype``, and in float32 those of the modules ``kept`` from float16."""
    if dtype is None:
        return skeleton
    wanted = dtype_name(torch_type(dtype))
    wide = kept if wanted == "float16" else ()

    def cast(spec: TensorSpec) -> TensorSpec:
        if not (torch_dtype(spec.dtype).is_floating_point and spec.persistent):
            return spec
        stays = any(f"{module}." in spec.name or module == spec.name for module in wide)
        return replace(spec, dtype="float32" if stays else wanted)

    return replace(skeleton, tensors=tuple(cast(spec) for spec in skeleton.tensors))


def _homes(skeleton: Skeleton, device_map: Mapping[str, AnyDevice], *, offload_buffers: bool) -> dict[str, DeviceId]:
    """Return each tensor's device; buffers stay on the cpu where the map says disk, unless ``offload_buffers``."""
    homes = homes_of(skeleton, device_map, otherwise=CPU)
    check_tied_parameters_on_same_device(skeleton.tied, device_map)
    buffers = [] if offload_buffers else [spec.name for spec in skeleton.tensors if spec.kind == "buffer"]
    return homes | {name: CPU for name in buffers if homes[name] == DISK}


def _claimed(folder: Path, load: Load) -> OffloadStore:
    """Return the store in ``folder`` itself, where scripts look for it; a folder of something else is refused."""
    key = load.store_key
    folder.mkdir(parents=True, exist_ok=True)
    if not claim(folder, key):
        raise ConfigError(f"offload_folder: {str(folder)!r} holds weights of something else; give an empty folder")
    return OffloadStore(folder)


def _sources_as_they_are(load: Load, spec: TensorSpec) -> Sequence[str]:
    """Return the tensors of the checkpoint that ``spec`` is served from; none where the folder has it."""
    return () if spec.name in load.stored else load.match.origins[spec.name][0].source_names


def _references(load: Load) -> dict[str, dict[str, object]]:
    """Return index entries for what is not in a file of its own name: tensors in the checkpoint, and tied names.

    The field has no word for what rests packed there: no index has it.
    """
    found: dict[str, dict[str, object]] = {}
    for spec in load.on_disk:
        if any(isinstance(load.reader.entries[name], PackedTensor) for name in _sources_as_they_are(load, spec)):
            continue
        known: dict[str, object] = {"dtype": spec.dtype, "shape": list(spec.shape)}
        if spec.name in load.served_by_row:
            names = load.served_by_row[spec.name]
            files = dict.fromkeys(str(load.reader.entries[name].file.path.absolute()) for name in names)
            found[spec.name] = {**known, "safetensors_files": list(files), "weight_names": list(names)}
            continue
        extent = load.served.get(spec.name)
        (source, *_) = [*load.match.origins[spec.name][0].source_names, ""]
        where = {"file": f"{spec.name}.dat"}
        if extent is not None:
            where = {"safetensors_file": str(extent.file.path.absolute()), "weight_name": source}
        names = load.skeleton.names_of(spec.name) if extent is not None else load.skeleton.names_of(spec.name)[1:]
        found |= {name: {**known, **where} for name in names}
    return found
