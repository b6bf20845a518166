"""The field's functions that put weights into a model: a checkpoint, offloaded weights, or a single tensor.

Names and signatures are those that scripts written against accelerate know.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offstage.pipeline.errors import ConfigError
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.dtypes import dtype_name, torch_dtype
from offstage.stages.checkpoints.packed import PackedTensor
from offstage.stages.checkpoints.readers import open_stored_reader
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.skeleton import Skeleton, longest_prefix, parent
from offstage.stages.empty_init.tied import (
    check_tied_parameters_on_same_device,
)
from offstage.stages.machine.devices import AnyDevice, device_id, torch_device
from offstage.stages.plan.plan import LoadPlan
from offstage.stages.shard_load.checkpoint_match import Load, prepare
from offstage.stages.shard_load.offload_store import claim
from offstage.stages.shard_load.place import PlacedWeights, bind, place
from offstage.stages.shard_load.sources import Sources, find_sources
from offstage.stages.shard_load.stored_weights import fill_store
from offstage.stages.units import CPU, DISK, DeviceId, tier

PathLike = str | os.PathLike[str]
TiedMap = dict[int, dict[Any, torch.Tensor]]


def load_state_dict(
    checkpoint_file: PathLike, device_map: Mapping[str, AnyDevice] | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of one weights file by name, each on the device that ``device_map`` gives it.

    A name goes by its longest prefix in the map; one that the map leaves out, or puts on ``disk``, is on the cpu.

    >>> tensors = load_state_dict(checkpoint / "model-00001-of-00004.safetensors")
    >>> tensors["model.embed_tokens.weight"].shape
    torch.Size([3072, 192])
    """
    reader = open_stored_reader(open_checkpoint(Path(checkpoint_file)))
    devices, tensors = device_map or {}, {}
    for name, entry in reader.entries.items():
        prefix = longest_prefix(name, devices)
        device = CPU if prefix is None else device_id(devices[prefix])
        tensors[name] = reader.read(name, torch_dtype(entry.dtype)).to(torch_device(device))
    return tensors


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

    Without a map all goes to the cpu; see ``homes_of`` for names that the map leaves out, and for tied ones. Tensors
    mapped to ``disk`` become meta tensors in the model; ``offload_folder`` gets an ``index.json`` that says where each
    can be read (``OffloadedWeightsLoader`` does), and the data of those that the checkpoint doesn't hold as they are.
    Buffers go to disk only with ``offload_buffers``. With ``offload_state_dict`` host weights of ``.bin`` files wait on
    disk while the files are read. Parameters require gradients as they did before.

    Floats come in ``dtype``, by default in the model's own; in float16 the modules ``keep_in_fp32_modules`` stay in
    float32. Without ``strict``, tensors that the model has no place for, and those that the checkpoint lacks, are
    warnings in the log that list them; the latter keep their values, or stay on meta if they are there. A ``dtype`` or
    a kind of number that doesn't fit is a ``CheckpointError`` always. ``full_state_dict`` changes nothing: every
    process loads for itself. So ``broadcast_from_rank0`` is refused, and so is ``offload_8bit_bnb``.

    >>> with init_empty_weights():
    ...     model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    >>> load_checkpoint_in_model(model, checkpoint, {"": "cpu"}, dtype="float32")
    >>> model.model.norm.weight.device, model.model.norm.weight.dtype
    (device(type='cpu'), torch.float32)
    """
    reasons = {
        "offload_8bit_bnb": offload_8bit_bnb and "weights are not quantized here",
        "broadcast_from_rank0": broadcast_from_rank0 and "every process loads what it needs itself",
    }
    for option in (option for option, reason in reasons.items() if reason):
        raise ConfigError(f"{option}: True is not supported: {reasons[option]}; leave it out")
    skeleton = with_dtype(describe(model, rehearsed=False), dtype, keep_in_fp32_modules or ())
    device_map = device_map or {"": CPU}
    homes = homes_of(skeleton, device_map, otherwise=CPU)
    check_tied_parameters_on_same_device(skeleton.tied, device_map)
    buffers = [] if offload_buffers else [spec.name for spec in skeleton.tensors if spec.kind == "buffer"]
    homes |= {name: CPU for name in buffers if homes[name] == DISK}
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
    load.check_twins()
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


def with_dtype(skeleton: Skeleton, dtype: torch.dtype | str | None, kept: Sequence[str]) -> Skeleton:
    """Return ``skeleton`` with its floats in ``dtype``, and in float32 those of the modules ``kept`` from float16."""
    if dtype is None:
        return skeleton
    wanted = dtype_name(torch_type(dtype))
    wide = kept if wanted == "float16" else ()
    tensors = []
    for spec in skeleton.tensors:
        stays = any(f"{module}." in spec.name or module == spec.name for module in wide)
        cast = spec.persistent and torch_dtype(spec.dtype).is_floating_point
        tensors.append(replace(spec, dtype="float32" if stays else wanted) if cast else spec)
    return replace(skeleton, tensors=tuple(tensors))


def _references(load: Load, sources: Sources) -> dict[str, dict[str, object]]:
    """Return index entries for what is not in a file of its own name: tensors in the checkpoint, and tied names.

    The field has no word for what rests packed there: no index has it.
    """
    references: dict[str, dict[str, object]] = {}
    for name, source in ((name, source) for name, source in sources.items() if source.home == DISK):
        step, names = load.step_of(name), load.skeleton.names_of(name)
        files = list(dict.fromkeys(str(at.file.path.absolute()) for at in source.at))
        tensors = list(load.pieces_of(step))
        place: dict[str, object] = {"safetensors_files": files, "weight_names": tensors}
        if source.is_stored:
            names, place = names[1:], {"file": f"{name}.dat"}
        elif source.way == "in_place":
            place = {"safetensors_file": files[0], "weight_name": tensors[0]}
        packed = any(isinstance(load.reader.entries[part], PackedTensor) for part in step.source_names)
        entry = {"dtype": source.spec.dtype, "shape": list(source.spec.shape), **place}
        references |= {} if packed and not source.is_stored else dict.fromkeys(names, entry)
    return references


def set_module_tensor_to_device(  # the field's signature
    module: nn.Module,
    tensor_name: str,
    device: AnyDevice,
    value: torch.Tensor | None = None,
    dtype: torch.dtype | str | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: TiedMap | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put one parameter or buffer of ``module`` on ``device``, with ``value`` as its new value if that is given.

    A float is cast to ``dtype``; without it a new value takes the dtype that the tensor has. A parameter requires
    gradients as before, and one that is there already stays the same object. ``tied_params_map`` (address of the data
    → device → tensor) makes tensors that share their data share it on the new device as well. After a move to an
    accelerator the memory that torch keeps there for later is given back, unless ``clear_cache`` is False.

    A tensor on meta that gets no value, and a value of another shape, are a ``ValueError``; ``fp16_statistics``, which
    belong to weights of 8 bits, a ``ConfigError``.

    >>> with init_empty_weights():
    ...     layer = nn.Linear(2, 1)
    >>> set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(1, 2))
    >>> layer.weight.device, layer.bias.device
    (device(type='cpu'), device(type='meta'))
    """
    if fp16_statistics is not None:
        raise ConfigError("fp16_statistics: weights of 8 bits are not supported; leave it out")
    owner, attribute = module.get_submodule(parent(tensor_name)), tensor_name.rpartition(".")[2]
    old = owner._parameters.get(attribute, owner._buffers.get(attribute))
    target = torch.device(device)
    if old is None:
        raise ValueError(f"{tensor_name!r} is no parameter or buffer of {type(module).__name__}")
    if value is None and old.is_meta and target.type != "meta":
        raise ValueError(f"{tensor_name!r} is on the meta device and has no data to move to {target}; give a value")
    if value is not None and value.shape != old.shape:
        raise ValueError(f"{tensor_name!r} has shape {list(old.shape)}, and the value {list(value.shape)}")
    is_parameter = isinstance(old, nn.Parameter)
    pointers = [tensor.data_ptr() for tensor in (value, old) if tensor is not None and not tensor.is_meta]
    tied = tied_params_map or {}
    shared: dict[Any, torch.Tensor] = next((tied[pointer] for pointer in pointers if pointer in tied), {})
    if device not in shared:
        source = old.detach() if value is None else value.detach()
        kept = source.dtype if value is None or dtype is not None else old.dtype
        wanted = torch_type(dtype) if dtype is not None and source.is_floating_point() else kept
        moved = source.to(target, wanted, non_blocking=non_blocking)
        if value is None and moved is source:
            return
        shared[device] = nn.Parameter(moved, requires_grad=old.requires_grad) if is_parameter else moved
    bind(module, (tensor_name,), shared[device] if is_parameter else shared[device].detach())
    if clear_cache and target.type not in ("cpu", "meta"):
        torch.accelerator.empty_cache()


def torch_type(dtype: torch.dtype | str) -> torch.dtype:
    """Return ``dtype``, which may be given by its name, with or without ``torch.``."""
    kind = getattr(torch, dtype_name(dtype), None) if isinstance(dtype, str) else dtype
    if not isinstance(kind, torch.dtype):
        raise ConfigError(f"dtype: {dtype!r} is no dtype of torch; give e.g. 'bfloat16'")
    return kind
