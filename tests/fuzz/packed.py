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
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.codecs.ggml_formats import FORMATS as GGML
from offstage.stages.checkpoints.codecs.gguf import GgufCodec
from offstage.stages.checkpoints.codecs.planes import codec_of, new_compressor, pack_tile, tile_borders
from offstage.stages.checkpoints.gguf_header import read_gguf_header
from offstage.stages.checkpoints.packed import PackedTensor
from offstage.stages.checkpoints.readers import open_reader, read_extent
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.shard_load.offload_store import StoredTensor, open_store
from tests.fuzz.formats import ALONE, RIGHT, Format, require
from tests.fuzz.mutations import JSON, SAFETENSORS
from tests.fuzz.packed_mutations import FRAMES, GGUF
from tests.fuzz.weights import Tensors, same
from tests.packed_references import unpacked_fp8
from tests.stages.checkpoints.ggufs import random_blocks, raw_gguf, settings, tensor

BLOCK = (4, 8)
GROUP_BYTES = 16
_SHAPE, _RUN = (6, 40), 80
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
        name: read_extent(entry) if isinstance(entry, PackedTensor) else reader.borrow(name)
        for name, entry in reader.entries.items()
    }


def _by_fp8(raw: Tensors) -> Tensors:
    tensors = {}
    for name, codes in raw.items():
        scale = raw.get(f"{name}_scale_inv")
        if scale is not None:
            tensors[name] = unpacked_fp8(codes, scale)
        elif not name.endswith("_scale_inv"):
            tensors[name] = codes
    return tensors


def _by_mxfp4(raw: Tensors) -> Tensors:
    tensors = {}
    for name, codes in raw.items():
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            tensors[stem] = convert_moe_packed_tensors(codes, raw[f"{stem}_scales"])
        elif not name.endswith("_scales"):
            tensors[name] = codes
    return tensors


def _attempt_weights(folder: Path, _pristine: Path, *, reference: Reference) -> str:
    """Unpack as transformers does; where it can't, or has other tensors, nothing is said of the answer."""
    unpacked = _unpacked(folder)
    try:
        wanted = reference(load(folder.joinpath("model.safetensors").read_bytes()))
    except (safetensors.SafetensorError, *_RAISED):
        return ALONE
    if unpacked.keys() != wanted.keys():
        return ALONE
    for name, made in unpacked.items():
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
    unpacked, whole = _unpacked(folder), _unpacked(pristine)
    if unpacked.keys() != whole.keys() or len({_declared(place) for place in (folder, pristine)}) > 1:
        return ALONE
    raw = load(folder.joinpath("model.safetensors").read_bytes())
    for name, made in unpacked.items():
        require(any(name in each and same(made, each[name]) for each in (whole, raw)), f"{name} is neither: {made!r}")
    return RIGHT


def _declared(folder: Path) -> str:
    """Return what a config that was read says of the sizes of blocks."""
    quantization = json.loads(folder.joinpath("config.json").read_bytes()).get("quantization_config")
    return str(quantization.get("weight_block_size") if isinstance(quantization, dict) else None)


def _make_gguf(folder: Path) -> None:
    for number, kinds in enumerate((("q4_0", "q8_0", "f32"), ("q4_k", "f16"), ("q6_k", "q5_1", "bf16"))):
        table, data = [], b""
        for place, kind in enumerate(kinds):
            rows = random_blocks(kind, 3, 256, seed=number).tobytes()
            table.append(tensor(f"blk.{place}.weight", [256, 3], code=GGML[kind].code, offset=len(data)))
            data += rows + bytes(-len(rows) % 32)
        metadata = {"general.architecture": "llama", "general.alignment": 32, "tokens": ["a", "", "é"]}
        folder.joinpath(f"{number}.gguf").write_bytes(raw_gguf(table, settings(metadata), data))


def _attempt_gguf(folder: Path, pristine: Path) -> str:
    """Unpack as the ``gguf`` package does; where it reads no such file, nothing is said of the answer."""
    outcome = RIGHT
    for path in sorted(folder.glob("*.gguf")):
        if path.read_bytes() == pristine.joinpath(path.name).read_bytes():
            continue
        unpacked = {
            name: read_extent(PackedTensor(GgufCodec((each.kind,)), (each.extent,), "float32", each.shape))
            for name, each in read_gguf_header(path).tensors.items()
        }
        wanted = _by_gguf(path)
        if wanted is None or wanted.keys() != unpacked.keys():
            outcome = ALONE
            continue
        for name, made in unpacked.items():
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


def _stored() -> dict[str, tuple[torch.Tensor, StoredTensor]]:
    """Return tensors with how a store has them."""
    tensors = {}
    for number, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        whole = (_matrix(number, *_SHAPE) * 0.02).to(dtype)
        name = str(dtype).removeprefix("torch.")
        tensors[name] = whole, StoredTensor(name, _SHAPE, (f"source.{name}",), run=_RUN)
    return tensors


def _make_copies(folder: Path) -> None:
    store, compressor = open_store(folder / "offload", "key"), new_compressor()
    with store.locked():
        for name, (whole, stored_tensor) in _stored().items():
            data, size = whole.view(-1).view(torch.uint8).numpy(), whole.element_size()
            borders = tile_borders(whole.numel(), _RUN)
            tiles = (pack_tile(data[begin * size : end * size], name, compressor) for begin, end in borders)
            store.put_packed(name, stored_tensor, tiles)
        store.note_plain("noise", StoredTensor("bfloat16", (3,), (), run=3))
        store.publish()


def _attempt_copies(folder: Path, _pristine: Path) -> str:
    """What comes out has the bits that were packed; a copy that the store has set aside is made again, in a run."""
    stored = _stored()
    copies = open_store(folder / "offload", "key").find(
        {name: stored_tensor for name, (_, stored_tensor) in stored.items()}
    )
    for name, copy in copies.items():
        made = read_extent(copy) if copy else stored[name][0]
        require(same(made, stored[name][0]), f"{name}: {made!r}")
    return RIGHT


def _attempt_planes(folder: Path, _pristine: Path) -> str:
    """Read the copies without the store, which knows each block of them: what was damaged later is found too."""
    index = json.loads((folder / "offload" / "index.json").read_bytes())
    for name, (whole, _) in _stored().items():
        entry, path = index[f"{name}.zstd"], folder / "offload" / f"{name}.zstd.dat"
        codec = codec_of(name, whole.numel(), entry["run"], entry["tiles"])
        require(codec is not None, f"{name} has no codec")
        if codec is not None:
            made = read_extent(codec.located(ShardFile(path.name, path, path.stat().st_size, None, ""), 0, _SHAPE))
            require(same(made, whole), f"{name}: {made!r}")
    return RIGHT


_fp8, _mxfp4 = (partial(_attempt_weights, reference=reference) for reference in (_by_fp8, _by_mxfp4))
FORMATS = (
    Format("fp8", _make_fp8, ("*.safetensors",), SAFETENSORS, _fp8),
    Format("fp8 config", _make_fp8, ("config.json",), JSON, _attempt_config),
    Format("mxfp4", _make_mxfp4, ("*.safetensors",), SAFETENSORS, _mxfp4),
    Format("mxfp4 config", _make_mxfp4, ("config.json",), JSON, _attempt_config),
    Format("gguf", _make_gguf, ("*.gguf",), GGUF, _attempt_gguf),
    Format("packed copies", _make_copies, ("offload/*.dat",), FRAMES, _attempt_copies),
    Format("planes", _make_copies, ("offload/*.dat",), FRAMES, _attempt_planes),
    Format("packed index", _make_copies, ("offload/*.json",), JSON, _attempt_copies),
)
