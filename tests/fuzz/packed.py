"""Weights that rest packed: quantised safetensors, GGUF files, planes. Unpacked as the libraries do it, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import safetensors
import torch
from safetensors.torch import load, save
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import dequantize_convertops

from stages.checkpoints.checkpoint import open_checkpoint
from stages.checkpoints.codecs.ggml_formats import FORMATS as GGML
from stages.checkpoints.codecs.gguf import GgufCodec
from stages.checkpoints.codecs.planes import codec_of, new_compressor, pack_tile, tile_borders
from stages.checkpoints.gguf_header import read_gguf_header
from stages.checkpoints.packed import PackedTensor
from stages.checkpoints.packed_reads import read_packed
from stages.checkpoints.readers import open_reader
from stages.checkpoints.shard_files import ShardFile
from tests.fuzz.formats import ALONE, RIGHT, Format, require
from tests.fuzz.mutations import JSON, SAFETENSORS
from tests.fuzz.packed_mutations import FRAMES, GGUF
from tests.fuzz.weights import Tensors, same
from tests.stages.checkpoints.ggufs import random_blocks, raw_gguf, settings, tensor

BLOCK = (4, 8)
GROUP_BYTES = 16
Reference = Callable[[Tensors], Tensors]


def _matrix(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _make_fp8(folder: Path) -> None:
    config = FineGrainedFP8Config(weight_block_size=BLOCK)
    quantiser = Fp8Quantize(SimpleNamespace(quantization_config=config))
    plain = {"norm.weight": torch.ones(6).bfloat16(), "head.weight": _matrix(9, 3, 8).bfloat16()}
    weights = {f"layers.{seed}.weight": _matrix(seed, 8, 16) for seed in range(3)}
    packed = {name: part for key, weight in weights.items() for name, part in quantiser.convert({key: weight}).items()}
    codes, exponents = packed["layers.0.weight"].clone(), torch.tensor([[120, 127]], dtype=torch.uint8)
    powers = {"power.weight": codes, "power.weight_scale_inv": exponents}
    _write(folder, {**plain, **packed, **powers}, config.to_dict())


def _make_mxfp4(folder: Path) -> None:
    chance = torch.Generator().manual_seed(0)
    packed: dict[str, torch.Tensor] = {"router.weight": _matrix(0, 2, 3)}
    for name, shape in (("a.experts.gate_up_proj", (2, 6, 2)), ("a.experts.down_proj", (2, 3, 1))):
        blocks = (*shape, GROUP_BYTES)
        packed[f"{name}_blocks"] = torch.randint(0, 256, blocks, generator=chance, dtype=torch.uint8)
        packed[f"{name}_scales"] = torch.randint(100, 140, shape, generator=chance, dtype=torch.uint8)
    _write(folder, packed, {"quant_method": "mxfp4", "modules_to_not_convert": ["router"]})


def _write(folder: Path, tensors: Tensors, quantization: Mapping[str, Any]) -> None:
    config = {"model_type": "llama", "quantization_config": quantization}
    folder.joinpath("config.json").write_text(json.dumps(config, default=str))
    folder.joinpath("model.safetensors").write_bytes(save(dict(tensors)))


def _unpacked(path: Path) -> Tensors:
    """Return all tensors of a checkpoint as they are used."""
    reader = open_reader(open_checkpoint(path))
    return {
        name: read_packed(entry) if isinstance(entry, PackedTensor) else reader.borrow(name)
        for name, entry in reader.entries.items()
    }


def _by_fp8(raw: Tensors) -> Tensors:
    unpacker = Fp8Dequantize(SimpleNamespace(quantization_config=None))
    found = {}
    for name, codes in raw.items():
        scale = raw.get(f"{name}_scale_inv")
        if scale is not None:
            found[name] = unpacker.convert({"weight": [codes], "weight_scale_inv": [scale]})["weight"].bfloat16()
        elif not name.endswith("_scale_inv"):
            found[name] = codes
    return found


def _by_mxfp4(raw: Tensors) -> Tensors:
    found = {}
    for name, codes in raw.items():
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            found[stem] = dequantize_convertops(codes, raw[f"{stem}_scales"], torch.bfloat16)
        elif not name.endswith("_scales"):
            found[name] = codes
    return found


def _attempt_weights(folder: Path, _pristine: Path, *, reference: Reference) -> str:
    """Unpack as transformers does; where it can't, or has other tensors, nothing is said of the answer."""
    found = _unpacked(folder)
    try:
        wanted = reference(load(folder.joinpath("model.safetensors").read_bytes()))
    except (safetensors.SafetensorError, *_RAISED):
        return ALONE
    if found.keys() != wanted.keys():
        return ALONE
    for name, made in found.items():
        require(_alike(made, wanted[name]), f"{name}: {made!r} instead of {wanted[name]!r}")
    return RIGHT


_RAISED = (
    RuntimeError,
    AssertionError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    NotImplementedError,
    ArithmeticError,
)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits, but for which NaN it is."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return same(one, other) or bool(torch.equal(one.nan_to_num(0.5), other.nan_to_num(0.5)))


def _attempt_config(folder: Path, pristine: Path) -> str:
    """Whatever a config says of them, tensors are unpacked as before, or are what the file has.

    But for the sizes of blocks: scales that fit several are taken by what is declared, where transformers takes what
    divides the matrix evenly.
    """
    found, whole = _unpacked(folder), _unpacked(pristine)
    if found.keys() != whole.keys() or len({_declared(place) for place in (folder, pristine)}) > 1:
        return ALONE
    raw = load(folder.joinpath("model.safetensors").read_bytes())
    for name, made in found.items():
        require(any(name in each and same(made, each[name]) for each in (whole, raw)), f"{name} is neither: {made!r}")
    return RIGHT


def _declared(folder: Path) -> str:
    """Return what a config that was read says of the sizes of blocks."""
    told = json.loads(folder.joinpath("config.json").read_bytes()).get("quantization_config")
    return str(told.get("weight_block_size") if isinstance(told, dict) else None)


def _make_gguf(folder: Path) -> None:
    for number, kinds in enumerate((("q4_0", "q8_0", "f32"), ("q4_k", "f16"), ("q6_k", "q5_1", "bf16"))):
        table, data = [], b""
        for place, kind in enumerate(kinds):
            rows = random_blocks(kind, 3, 256, seed=number).tobytes()
            table.append(tensor(f"blk.{place}.weight", [256, 3], code=GGML[kind].code, offset=len(data)))
            data += rows + bytes(-len(rows) % 32)
        told = {"general.architecture": "llama", "general.alignment": 32, "tokens": ["a", "", "é"]}
        folder.joinpath(f"{number}.gguf").write_bytes(raw_gguf(table, settings(told), data))


def _attempt_gguf(folder: Path, pristine: Path) -> str:
    """Unpack as the ``gguf`` package does; where it reads no such file, nothing is said of the answer."""
    outcome = RIGHT
    for path in sorted(folder.glob("*.gguf")):
        if path.read_bytes() == pristine.joinpath(path.name).read_bytes():
            continue
        found = {
            name: read_packed(PackedTensor(GgufCodec((each.kind,)), (each.extent,), "float32", each.shape))
            for name, each in read_gguf_header(path).tensors.items()
        }
        wanted = _by_gguf(path)
        if wanted is None or wanted.keys() != found.keys():
            outcome = ALONE
            continue
        for name, made in found.items():
            require(_alike(made, wanted[name]), f"{name}: {made!r} instead of {wanted[name]!r}")
    return outcome


def _by_gguf(path: Path) -> Tensors | None:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    try:
        with np.errstate(all="ignore"):
            each = {one.name: dequantize(one.data, one.tensor_type) for one in GGUFReader(path).tensors}
        return {name: torch.from_numpy(np.array(values, np.float32)) for name, values in each.items()}
    except (*_RAISED, OSError, EOFError):
        return None


def _make_planes(folder: Path) -> None:
    compressor = new_compressor()
    for number, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        whole = (_matrix(number, 6, 40) * 0.02).to(dtype)
        name = str(dtype).removeprefix("torch.")
        data, run = whole.view(-1).view(torch.uint8).numpy(), 80
        size = whole.element_size()
        tiles = [pack_tile(data[begin * size : end * size], name, compressor) for begin, end in tile_borders(240, run)]
        told = {
            "dtype": name,
            "shape": [6, 40],
            "run": run,
            "tiles": [[len(frame) for frame in tile] for tile in tiles],
        }
        folder.joinpath(f"{name}.json").write_text(json.dumps(told))
        folder.joinpath(f"{name}.dat").write_bytes(b"".join(frame for tile in tiles for frame in tile))


def _attempt_planes(folder: Path, pristine: Path) -> str:
    """What comes out has the bits that were packed; a change that isn't found is one that harmed nothing."""
    for index in sorted(folder.glob("*.json")):
        found, whole = (_read_planes(place / index.name) for place in (folder, pristine))
        require(same(found, whole), f"{index.stem}: {found!r}")
    return RIGHT


def _read_planes(index: Path) -> torch.Tensor:
    told, path = json.loads(index.read_text()), index.with_suffix(".dat")
    codec = codec_of(told["dtype"], 240, told["run"], told["tiles"])
    if codec is None:
        raise ValueError(f"{index}: no codec")
    file = ShardFile(path.name, path, path.stat().st_size, None, "")
    return read_packed(codec.located(file, 0, tuple(told["shape"])))


_fp8, _mxfp4 = (partial(_attempt_weights, reference=reference) for reference in (_by_fp8, _by_mxfp4))
FORMATS = (
    Format("fp8", _make_fp8, ("*.safetensors",), SAFETENSORS, _fp8),
    Format("fp8 config", _make_fp8, ("config.json",), JSON, _attempt_config),
    Format("mxfp4", _make_mxfp4, ("*.safetensors",), SAFETENSORS, _mxfp4),
    Format("mxfp4 config", _make_mxfp4, ("config.json",), JSON, _attempt_config),
    Format("gguf", _make_gguf, ("*.gguf",), GGUF, _attempt_gguf),
    Format("planes", _make_planes, ("*.dat",), FRAMES, _attempt_planes),
)
