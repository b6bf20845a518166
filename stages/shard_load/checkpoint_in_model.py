"""The field's functions for weights in a model: one tensor, one file, a whole checkpoint.

Names and signatures are those that scripts written against accelerate know.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from pipeline.cache.fingerprint import fingerprint
from pipeline.errors import ConfigError
from stages.checkpoints.checkpoint import identity, open_checkpoint
from stages.checkpoints.dtypes import dtype_name, torch_dtype
from stages.checkpoints.extents import Extent
from stages.checkpoints.readers import open_reader
from stages.empty_init.describe import describe
from stages.empty_init.skeleton import Skeleton, TensorSpec, parent
from stages.machine.devices import torch_device
from stages.shard_load.load import Load, check_twins, prepare
from stages.shard_load.offload_store import OffloadStore, claim
from stages.shard_load.placed_weights import fill_store, place
from stages.units import CPU, DISK, DeviceId, parse_device

PathLike = str | os.PathLike[str]
AnyDevice = torch.device | str | int


def load_state_dict(
    checkpoint_file: PathLike, device_map: Mapping[str, AnyDevice] | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of one weights file by name, each on the device that ``device_map`` gives it.

    A name goes by its longest prefix in the map; without a map, or with ``disk``, it is on the cpu.
    """
    reader = open_reader(open_checkpoint(Path(checkpoint_file)))
    found = {}
    for name, entry in reader.entries.items():
        tensor = reader.read(name, torch_dtype(entry.dtype))
        found[name] = tensor.to(torch_device(home_of(name, device_map) if device_map else CPU))
    return found


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: AnyDevice,
    value: torch.Tensor | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    tied_params_map: dict[int, dict[AnyDevice, torch.Tensor]] | None = None,
    non_blocking: bool = False,
) -> None:
    """Put one parameter or buffer of ``module`` on ``device``, with ``value`` as its new value if that is given.

    A new value is cast to ``dtype``, by default to the dtype that the tensor has. ``tied_params_map`` (address of the
    data → device → tensor) makes tensors that share their data share it on the new device as well. A tensor on meta
    that gets no value, and a value of another shape, are a ``ValueError``.
    """
    owner, attribute = module.get_submodule(parent(tensor_name)), tensor_name.rpartition(".")[2]
    old = owner._parameters.get(attribute, owner._buffers.get(attribute))
    if old is None:
        raise ValueError(f"{tensor_name!r} is no parameter or buffer of {type(module).__name__}")
    target = torch.device(device)
    if value is None and old.is_meta and target.type != "meta":
        raise ValueError(f"{tensor_name!r} is on the meta device and has no data to move to {target}; give a value")
    if value is not None and value.shape != old.shape:
        raise ValueError(f"{tensor_name!r} has shape {list(old.shape)}, and the value {list(value.shape)}")
    source = old.data if value is None else value
    shared = (tied_params_map or {}).get(source.data_ptr(), {})
    kind = torch_type(dtype) if dtype is not None else source.dtype if value is None else _cast(value, old)
    moved = shared.get(device)
    if moved is None:
        moved = source.to(target, kind, non_blocking=non_blocking)
        if tied_params_map is not None and source.data_ptr() in tied_params_map:
            tied_params_map[source.data_ptr()][device] = moved
    if attribute in owner._parameters:
        owner._parameters[attribute] = nn.Parameter(moved, requires_grad=old.requires_grad)
    else:
        owner._buffers[attribute] = moved


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: PathLike,
    device_map: Mapping[str, AnyDevice] | None = None,
    offload_folder: PathLike | None = None,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    strict: bool = True,
) -> None:
    """Load ``checkpoint`` (a folder, a weights file or an index) into ``model``, each tensor where the map says.

    Without a map all goes to the cpu. Tensors mapped to ``disk`` become meta tensors in the model; ``offload_folder``
    gets an ``index.json`` that says where each can be read (``OffloadedWeightsLoader`` does), and the data of those
    that the checkpoint doesn't hold as they are. Buffers go to disk only with ``offload_buffers``. With
    ``offload_state_dict`` host weights of ``.bin`` files wait on disk while the files are read. Without ``strict``,
    tensors that the model has no place for are passed over.
    """
    skeleton = _with_dtype(describe(model, rehearsed=False), dtype)
    homes = dict(_homes(skeleton, device_map, offload_buffers=offload_buffers))
    load = prepare(model, skeleton, homes=homes, checkpoint=open_checkpoint(Path(checkpoint)), strict=strict)
    check_twins(load)
    if load.on_disk and offload_folder is None:
        raise ConfigError("offload_folder: tensors are mapped to disk, and no folder is given to keep their index in")
    folder = None if offload_folder is None else Path(offload_folder)
    files = {}
    if folder is not None and load.on_disk:
        store = _claimed(folder, load)
        files = fill_store(load, store)
        store.refer(_references(load))
    spills = offload_state_dict and load.checkpoint.format == "bin"
    place(load, files, spill_folder=(folder or Path.cwd()) if spills else None)


def torch_type(dtype: torch.dtype | str) -> torch.dtype:
    """Return ``dtype``, which may be given by its name, with or without ``torch.``."""
    found = getattr(torch, dtype_name(dtype), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype: {dtype!r} is no dtype of torch; give e.g. 'bfloat16'")
    return found


def home_of(name: str, device_map: Mapping[str, AnyDevice]) -> DeviceId:
    """Return the device id of the tensor ``name``: that of its longest prefix in ``device_map``."""
    prefix = name
    while prefix and prefix not in device_map:
        prefix = parent(prefix)
    if prefix not in device_map:
        raise ConfigError(f"device_map: leaves out {name!r}; map it, or '' for all that is not mapped")
    device = device_map[prefix]
    return parse_device(str(device) if isinstance(device, torch.device) else device)


def _cast(value: torch.Tensor, old: torch.Tensor) -> torch.dtype:
    """Return the dtype for a new value: floats become what the tensor was, whole numbers stay as they are."""
    return old.dtype if value.is_floating_point() else value.dtype


def _with_dtype(skeleton: Skeleton, dtype: torch.dtype | str | None) -> Skeleton:
    if dtype is None:
        return skeleton
    name = dtype_name(torch_type(dtype))

    def cast(spec: TensorSpec) -> TensorSpec:
        return replace(spec, dtype=name) if torch_dtype(spec.dtype).is_floating_point and spec.persistent else spec

    return replace(skeleton, tensors=tuple(cast(spec) for spec in skeleton.tensors))


def _homes(
    skeleton: Skeleton, device_map: Mapping[str, AnyDevice] | None, *, offload_buffers: bool
) -> Iterator[tuple[str, DeviceId]]:
    for spec in skeleton.tensors:
        home = home_of(skeleton.leader(spec.name), device_map) if device_map else CPU
        kept = spec.kind == "buffer" and home == DISK and not offload_buffers
        yield spec.name, CPU if kept else home


def _claimed(folder: Path, load: Load) -> OffloadStore:
    """Return the store in ``folder`` itself, where scripts look for it; a folder of something else is refused."""
    key = fingerprint({"checkpoint": identity(load.checkpoint), "dtype": load.main_dtype})
    folder.mkdir(parents=True, exist_ok=True)
    if not claim(folder, key):
        raise ConfigError(f"offload_folder: {str(folder)!r} holds weights of something else; give an empty folder")
    return OffloadStore(folder)


def _references(load: Load) -> dict[str, dict[str, object]]:
    """Return index entries for what is not in a file of its own name: tensors in the checkpoint, and tied names."""
    found: dict[str, dict[str, object]] = {}
    for spec in load.on_disk:
        known = {"dtype": spec.dtype, "shape": list(spec.shape)}
        extent: Extent | None = load.served.get(spec.name)
        (source, *_) = [*load.layout.origins[spec.name][0].source_names, ""]
        where = {"file": f"{spec.name}.dat"}
        if extent is not None:
            where = {"safetensors_file": str(extent.file.path.absolute()), "weight_name": source}
        names = load.names_of(spec.name) if extent is not None else load.names_of(spec.name)[1:]
        found |= {name: {**known, **where} for name in names}
    return found
