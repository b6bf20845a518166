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
from offstage.stages.checkpoints.packed import PackedTensor
from offstage.stages.checkpoints.readers import open_stored_reader
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.skeleton import Skeleton, TensorSpec, longest_prefix
from offstage.stages.empty_init.tied import check_tied_parameters_on_same_device
from offstage.stages.machine.devices import AnyDevice, device_id, torch_device
from offstage.stages.shard_load.offload_store import claim
from offstage.stages.shard_load.place import PlacedWeights, place
from offstage.stages.shard_load.sources import Load, LoadPlan, Sources, TensorSource, check_twins, find_sources, prepare
from offstage.stages.shard_load.stored_weights import fill_store
from offstage.stages.shard_load.tensor_in_module import torch_type
from offstage.stages.units import CPU, DISK, DeviceId, tier

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
    load = prepare(model, skeleton, checkpoint=open_checkpoint(Path(checkpoint)), strict=strict, partial=not strict)
    # The field's index of what lies on disk has no word for what rests packed.
    sources = find_sources(load, LoadPlan(homes, unpacks=False))
    if any(source.home == DISK for source in sources.values()) and offload_folder is None:
        raise ConfigError("offload_folder: tensors are mapped to disk, and no folder is given to keep their index in")
    folder = None if offload_folder is None else Path(offload_folder)
    fill_model(load, sources, folder, spills=offload_state_dict)


def fill_model(load: Load, sources: Sources, folder: Path | None, *, spills: bool) -> PlacedWeights:
    """Fill the model of ``load`` with its weights; those on disk are served from the checkpoint, or from ``folder``.

    The folder gets an index of all of them, and is needed (a ``ConfigError``) for those that the checkpoint doesn't
    hold as they are. With ``spills`` host weights of ``.bin`` files wait on disk while the files are read.
    """
    check_twins(load)
    wanted = [name for name, source in sources.items() if source.wants_store]
    if wanted and folder is None:
        raise ConfigError(
            f"offload_folder: {len(wanted)} tensors on disk are not in the checkpoint as the model needs them, "
            f"{wanted[0]!r} first; give a folder to write them to"
        )
    if folder is not None and any(source.home == DISK for source in sources.values()):
        store = claim(folder, load.store_key)  # itself, where scripts look for it
        if store is None:
            raise ConfigError(f"offload_folder: {str(folder)!r} holds weights of something else; give an empty folder")
        sources = fill_store(load, sources, store)
        store.refer(_references(load, sources))
    spills = spills and load.checkpoint.format == "bin"
    return place(load, sources, spill_folder=(folder or Path.cwd()) if spills else None)


def homes_of(skeleton: Skeleton, device_map: Mapping[str, AnyDevice], *, otherwise: DeviceId) -> dict[str, DeviceId]:
    """Return where each tensor lies: on the device of its longest prefix in ``device_map``.

    Of the names of one tied tensor one suffices; where they disagree it lies on the fastest of their devices. A buffer
    that no state dict holds may be left out, and lies on the device ``otherwise``. Raises ``ConfigError`` for a tensor
    that the map leaves out.
    """
    devices = {name: device_id(device) for name, device in device_map.items()}
    homes: dict[str, DeviceId] = {}
    for spec in skeleton.tensors:
        prefixes = [longest_prefix(name, devices) for name in skeleton.names_of(spec.name)]
        covered = [devices[prefix] for prefix in prefixes if prefix is not None]
        if not covered and spec.persistent:
            raise ConfigError(f"device_map: leaves out {spec.name!r}; map it, or '' for all that is not mapped")
        homes[spec.name] = min(covered, key=tier, default=otherwise)
    return homes


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


def _references(load: Load, sources: Sources) -> dict[str, dict[str, object]]:
    """Return index entries for what is not in a file of its own name: tensors in the checkpoint, and tied names.

    The field has no word for what rests packed there: no index has it.
    """
    found: dict[str, dict[str, object]] = {}
    for source in (source for source in sources.values() if source.home == DISK):
        names, spec = load.skeleton.names_of(source.spec.name), source.spec
        known: dict[str, object] = {"dtype": spec.dtype, "shape": list(spec.shape)}
        if source.is_stored:
            found |= {name: {**known, "file": f"{spec.name}.dat"} for name in names[1:]}
        elif not _rests_packed(load, source):
            found |= {name: {**known, **_places(load, source)} for name in names}
    return found


def _rests_packed(load: Load, source: TensorSource) -> bool:
    entries = (load.reader.entries[name] for name in load.step_of(source).source_names)
    return any(isinstance(entry, PackedTensor) for entry in entries)


def _places(load: Load, source: TensorSource) -> dict[str, object]:
    """Return where a tensor is in files of the checkpoint: one of theirs, or several, one after the other."""
    files = list(dict.fromkeys(str(at.file.path.absolute()) for at in source.at))
    names = load.pieces_of(load.step_of(source))
    if source.way == "by_expert":
        return {"safetensors_files": files, "weight_names": list(names)}
    return {"safetensors_file": files[0], "weight_name": names[0]}
