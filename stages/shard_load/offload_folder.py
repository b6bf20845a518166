"""The field's functions for weights on disk: ``NAME.dat`` files of raw bytes and an ``index.json``.

Names, signatures and file format are those that scripts written against accelerate know; files written by one are
read by the other. Writing is whole or not at all, and an index may refer to tensors inside safetensors files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from offstage.pipeline.atomic_files import write_whole
from offstage.pipeline.cache.block_sums import INDEX_NAME
from offstage.pipeline.errors import CheckpointError, StorageError
from offstage.stages.checkpoints.dtypes import dtype_name, torch_dtype
from offstage.stages.checkpoints.extents import Extent, is_shape
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.checkpoints.safetensors_header import read_header
from offstage.stages.checkpoints.shard_files import ShardFile, check_regular
from offstage.stages.machine.aligned_memory import byte_view
from offstage.stages.shard_load.expert_rows import locate_rows, read_rows
from offstage.stages.shard_load.offload_store import add_entries, plain_index
from offstage.stages.units import DTYPE_BYTES, format_bytes, tensor_bytes


def offload_weight(
    weight: torch.Tensor,
    weight_name: str,
    offload_folder: str | os.PathLike[str],
    index: dict[str, dict[str, Any]] | None = None,
) -> dict[str, dict[str, Any]] | None:
    """Write ``weight`` to ``offload_folder/weight_name.dat`` and add its dtype and shape to ``index``, if given.

    Returns ``index``. A folder that can't be written is a ``StorageError`` that names it and the bytes needed.

    >>> offload_weight(torch.ones(2, 3), "weight", folder, {})
    {'weight': {'dtype': 'float32', 'shape': [2, 3]}}
    """
    folder, data = Path(offload_folder), weight.detach().cpu().contiguous()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{weight_name}.dat", byte_view(data))
    except OSError as error:
        needed = f"{weight_name!r} ({format_bytes(data.nbytes)})"
        raise StorageError(f"{folder}: writing {needed} failed: {error.strerror}; set another folder") from error
    if index is not None:
        index[weight_name] = {"dtype": dtype_name(data.dtype), "shape": list(data.shape)}
    return index


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Return the tensor in ``weight_file``, whose index entry ``weight_info`` gives ``dtype`` and ``shape``.

    >>> entry = offload_weight(torch.ones(2), "weight", folder, {})["weight"]
    >>> load_offloaded_weight(folder / "weight.dat", entry)
    tensor([1., 1.])
    """
    return read_extent(weight_extent(Path(weight_file), weight_info))


def weight_extent(path: Path, weight_info: Mapping[str, Any]) -> Extent:
    """Return where the tensor lies that is alone in the file ``path``; its index entry is ``weight_info``."""
    dtype, shape = _dtype_name(path, weight_info.get("dtype")), weight_info.get("shape")
    if not is_shape(list(shape) if isinstance(shape, tuple | torch.Size) else shape):
        raise CheckpointError(f"{path}: {shape!r} in its index is no shape; offload the weights again")
    shape = tuple(shape or ())
    count = tensor_bytes(shape, dtype)
    size = check_regular(path).st_size if count else 0
    if size != count:
        raise CheckpointError(f"{path}: {size} bytes instead of the {count} that its index tells")
    return Extent(ShardFile(path.name, path, size, None, ""), 0, dtype, shape)


def _dtype_name(path: Path, dtype: object) -> str:
    """Return the name of a dtype that the index of ``path`` tells, or raise a ``CheckpointError``."""
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES or not hasattr(torch, dtype):
        known = ", ".join(name for name in DTYPE_BYTES if hasattr(torch, name))
        raise CheckpointError(f"{path}: unknown dtype {dtype!r} in its index; known: {known}")
    return dtype


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write every tensor of ``state_dict`` into the folder ``save_dir``, with its index.

    >>> offload_state_dict(folder, {"weight": torch.ones(2)})
    >>> sorted(file.name for file in folder.iterdir())
    ['index.json', 'weight.dat']
    """
    index: dict[str, dict[str, Any]] = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index)
    save_offload_index(index, save_dir)


def save_offload_index(index: Mapping[str, Mapping[str, Any]], offload_folder: str | os.PathLike[str]) -> None:
    """Add the entries of ``index`` to the folder's ``index.json``; what other processes add meanwhile stays.

    >>> save_offload_index(offload_weight(torch.ones(2), "weight", folder, {}), folder)
    >>> OffloadedWeightsLoader(save_folder=folder)["weight"]
    tensor([1., 1.])
    """
    folder = Path(offload_folder)
    try:
        if index:
            add_entries(folder, index)
    except OSError as error:
        raise StorageError(f"{folder}: writing {INDEX_NAME} failed: {error.strerror}; set another folder") from error


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """The tensors of a state dict in memory and those of an offload folder, as one mapping.

    ``state_dict`` counts where both have a name. ``index`` is by default that of ``save_folder``; an entry with
    ``safetensors_file`` (and ``weight_name`` where it differs) is read from there, and one with ``safetensors_files``
    is the tensors ``weight_names`` in them, one after the other: the experts of a mixture. Those on disk are read at
    each access, to ``device`` if one is given; the header of a safetensors file is read once, and again if it changes.

    >>> offload_state_dict(folder, {"a": torch.zeros(2)})
    >>> weights = OffloadedWeightsLoader({"b": torch.ones(2)}, folder)
    >>> sorted(weights), weights["a"]
    (['a', 'b'], tensor([0., 0.]))
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("OffloadedWeightsLoader needs a state_dict, a save_folder or an index")
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        self.index = (plain_index(Path(save_folder)) if save_folder is not None else {}) if index is None else index
        self.device = device
        self.all_keys = list(dict.fromkeys([*self.state_dict, *self.index]))
        self._headers: dict[Path, tuple[ShardFile, dict[str, Extent]]] = {}

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        info, extents = self.index[key], self.extents(key)
        path, shape, count = extents[0].file.path, info.get("shape"), len(extents)
        rows = locate_rows(extents, tuple(shape or ()), extents[0].dtype) if is_shape(shape) and count > 1 else ()
        if count > 1 and not rows:
            raise CheckpointError(f"{path}: {count} of its tensors don't make up one of {shape!r}, as an index says")
        tensor = read_rows(rows) if rows else read_extent(extents[0])
        if "dtype" in info:
            tensor = tensor.to(torch_dtype(_dtype_name(path, info["dtype"])))
        return tensor if self.device is None else tensor.to(self.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def extents(self, key: str) -> list[Extent]:
        """Return where the tensor ``key`` lies on disk, as it lies there, for a reader that has buffers of its own.

        Where it lies in several pieces, the tensor is these, one after the other.
        """
        info = self.index[key]
        if "safetensors_files" in info:
            return self._pieces(info["safetensors_files"], info.get("weight_names"))
        if info.get("safetensors_file") is None:
            return [weight_extent(Path(self.save_folder or ".") / str(info.get("file", f"{key}.dat")), info)]
        return self._pieces([info["safetensors_file"]], [info.get("weight_name", key)])

    def _pieces(self, files: object, names: object) -> list[Extent]:
        if not (isinstance(files, list) and isinstance(names, list) and files and names):
            raise CheckpointError(f"{self.save_folder}: its index lists no files or no tensors; offload them again")
        entries = {name: at for file in files for name, at in self._header(Path(str(file)))[1].items()}
        for name in (name for name in names if str(name) not in entries):
            raise CheckpointError(f"{files[0]}: holds no tensor {name!r}, which the offload index says it does")
        return [entries[str(name)] for name in names]

    def _header(self, path: Path) -> tuple[ShardFile, dict[str, Extent]]:
        """Return the file ``path`` and its tensors, as they were read before if it is still that file."""
        status, known = check_regular(path), self._headers.get(path)
        if known is None or (known[0].size, known[0].mtime_ns) != (status.st_size, status.st_mtime_ns):
            known = self._headers[path] = read_header(path)
        return known


class PrefixedDataset(Mapping[str, torch.Tensor]):
    """A view of ``dataset`` whose keys are looked up with ``prefix`` before them; its keys are those that have it.

    >>> PrefixedDataset({"layer.weight": 1, "head": 2}, "layer.")["weight"]
    1
    """

    def __init__(self, dataset: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return (key for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
