"""Weights: safetensors and ``.bin`` files, whole and in shards. Read as the libraries read them, or refused."""

from __future__ import annotations

import json
import pickle
import struct
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load, save

from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.readers import open_reader
from tests.fuzz.formats import ALONE, RIGHT, Format, require
from tests.fuzz.mutations import JSON, SAFETENSORS, ZIP

Tensors = Mapping[str, torch.Tensor]


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of several dtypes and shapes, small: a header or a directory is most of such a file."""
    chance = torch.Generator().manual_seed(seed)
    base = torch.randn(6, 4, generator=chance)
    return {
        "embed.weight": base,
        "layer.0.weight": base[:4].t().contiguous().half(),
        "layer.0.bias": torch.arange(4, dtype=torch.int32) + seed,
        "layer.1.weight": torch.randn(3, 2, 2, generator=chance).bfloat16(),
        "layer.1.mask": torch.tensor([True, False, True]),
        "scale": torch.tensor(float(seed)),
        "none": torch.empty(0, 3),
    }


def _views(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors that share storages and don't lie in order, as a ``.bin`` may hold them."""
    base = torch.arange(24.0) + seed
    return {
        **_tensors(seed),
        "tied": base,
        "turned": base.view(6, 4).t(),
        "part": base[3:9],
        "wide": base[:1].expand(5),
    }


def _read(path: Path) -> Tensors:
    reader = open_reader(open_checkpoint(path))
    return {name: reader.borrow(name) for name in reader.entries}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are of one shape and dtype and have the same bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other) if tensor.numel()]
    return not bits or torch.equal(*bits)


def _compare(tensors: Tensors, wanted: Tensors) -> None:
    require(tensors.keys() == wanted.keys(), f"names {sorted(tensors)} instead of {sorted(wanted)}")
    for name, tensor in tensors.items():
        require(same(tensor, wanted[name]), f"{name}: {tensor!r} instead of {wanted[name]!r}")


def _make_safetensors(folder: Path) -> None:
    for seed in range(3):
        folder.joinpath(f"{seed}").mkdir()
        metadata = {"format": "pt"} if seed else None
        folder.joinpath(f"{seed}", "model.safetensors").write_bytes(save(_tensors(seed), metadata))


def _attempt_safetensors(folder: Path, pristine: Path) -> str:
    path = _changed(folder, pristine)
    tensors = _read(path)
    try:
        wanted = load(path.read_bytes())
    except (safetensors.SafetensorError, KeyError):
        return ALONE
    _compare(tensors, wanted)
    return RIGHT


def _changed(folder: Path, pristine: Path) -> Path:
    """Return the file of ``folder`` that isn't as in ``pristine``; any of them where the change was none."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    changed = (path for path in files if path.read_bytes() != (pristine / path.relative_to(folder)).read_bytes())
    return next(changed, files[0])


def _make_bins(folder: Path) -> None:
    for seed in range(3):
        folder.joinpath(f"{seed}").mkdir()
        torch.save(_views(seed), folder / f"{seed}" / "model.bin")


def _make_old_bins(folder: Path) -> None:
    for seed in range(3):
        folder.joinpath(f"{seed}").mkdir()
        torch.save(_views(seed), folder / f"{seed}" / "model.pt", _use_new_zipfile_serialization=False)


def _attempt_bin(folder: Path, pristine: Path) -> str:
    """Read as ``torch.load`` does, from the file or from a map of it: where the two differ, either is right."""
    path = _changed(folder, pristine)
    tensors = _read(path)
    wanted = [each for mapped in (False, True) if (each := _torch_loads(path, mapped=mapped)) is not None]
    if not wanted:
        return ALONE
    agreeing = [
        each for each in wanted if tensors.keys() == each.keys() and all(same(tensors[n], each[n]) for n in tensors)
    ]
    if not agreeing:
        _compare(tensors, wanted[0])
    return RIGHT


def _torch_loads(path: Path, *, mapped: bool) -> Tensors | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (pickle.PickleError, struct.error, ArithmeticError, LookupError, *_PLAIN):
        return None
    tensors = isinstance(loaded, dict) and all(isinstance(value, torch.Tensor) for value in loaded.values())
    return loaded if tensors else None


_PLAIN = (RuntimeError, ValueError, TypeError, AttributeError, EOFError, AssertionError, ImportError, MemoryError)


def _make_sharded(folder: Path, *, name: str, write: Callable[[Tensors, Path], object]) -> None:
    state = {f"{key}.{seed}": tensor for seed in range(3) for key, tensor in _tensors(seed).items()}
    weight_map = {}
    for number, part in enumerate((list(state)[::2], list(state)[1::2])):
        stem, suffix = name.split(".")
        shard = f"{stem}-{number + 1:05}-of-00002.{suffix}"
        write({key: state[key] for key in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 100}, "weight_map": weight_map}
    folder.joinpath(f"{name}.index.json").write_text(json.dumps(index, indent=2))
    folder.joinpath("whole.safetensors").write_bytes(save(state))


def _make_index(folder: Path) -> None:
    _make_sharded(folder, name="model.safetensors", write=lambda part, path: path.write_bytes(save(dict(part))))


def _make_bin_index(folder: Path) -> None:
    _make_sharded(folder, name="pytorch_model.bin", write=lambda part, path: torch.save(dict(part), path))


def _attempt_index(folder: Path, pristine: Path) -> str:
    """Whatever an index says, a name is that tensor; what no index names isn't there, or is refused."""
    open_checkpoint(folder, depth="index")
    wanted = load((pristine / "whole.safetensors").read_bytes())
    for name, tensor in _read(folder).items():
        require(name in wanted and same(tensor, wanted[name]), f"{name}: {tensor!r}")
    return RIGHT


FORMATS = (
    Format("safetensors", _make_safetensors, ("*.safetensors",), SAFETENSORS, _attempt_safetensors),
    Format("bin", _make_bins, ("*.bin",), ZIP, _attempt_bin),
    Format("old bin", _make_old_bins, ("*.pt",), ZIP, _attempt_bin),
    Format("index", _make_index, ("*.index.json",), JSON, _attempt_index),
    Format("bin index", _make_bin_index, ("*.index.json",), JSON, _attempt_index),
)
