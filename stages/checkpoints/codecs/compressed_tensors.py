"""Which entries of a checkpoint of the library compressed-tensors are one weight.

A weight rests as ``X.weight``, or as ``X.weight_packed`` where several codes share a number, with ``X.weight_scale``
beside it. The library multiplies in the dtype of its scales, so the codec unpacks to that one alone unless it is
float32; in another dtype of the model the weight is cast, as transformers casts it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import replace

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.codecs.compressed_scheme import WeightScheme, weight_scheme
from offstage.stages.checkpoints.codecs.scaled_codes import DTYPES, Codes, ScaledCodes
from offstage.stages.checkpoints.extents import Extent, TensorHeader, misfit
from offstage.stages.checkpoints.packed import AtRest, PackedTensor
from offstage.stages.checkpoints.shard_files import opened_shard, read_into

_SCALE, _PACKED, _GLOBAL, _SHAPE = "weight_scale", "weight_packed", "weight_global_scale", "weight_shape"
_BESIDE = (
    _SCALE, _GLOBAL, _SHAPE, "input_scale", "input_zero_point", "input_global_scale", "output_scale",
    "output_zero_point", "q_scale", "k_scale", "v_scale",
)  # fmt: skip
"""What is no weight: what weights are unpacked by, or what activations and caches would be rounded by."""
_UNSERVED = ("weight_zero_point", "weight_g_idx")

_REST: Mapping[Codes, tuple[tuple[str, ...], int]] = {
    "fp8": (("float8_e4m3fn",), 1),
    "int8": (("int8",), 1),
    "int4": (("int32",), 8),
    "fp4": (("uint8",), 2),
}
"""The dtypes that codes rest in, and how many are in one number."""
_SCALES = ("float32", "bfloat16", "float16")
_OF_FP4: Mapping[str, tuple[str, ...]] = {"group": ("uint8",), "tensor_group": ("float8_e4m3fn",)}
"""The scales of FP4 have bytes of their own: powers of two in MXFP4, and FP8 in NVFP4."""


def fold_compressed(entries: Mapping[str, Extent], quantization: Mapping[str, object]) -> dict[str, AtRest]:
    """Return ``entries`` with each weight and what it is unpacked by as one.

    A ``CheckpointError`` names the scheme or the tensor that isn't served, or what doesn't fit.
    """
    scheme = weight_scheme(quantization)
    folded: dict[str, AtRest] = {}
    for name, entry in entries.items():
        module, _, kind = name.rpartition(".")
        if kind in _UNSERVED:
            raise CheckpointError(f"{entry.file.path}: tensor {name!r}: {kind} isn't served; {_ADVICE}")
        if kind == _PACKED or (kind == "weight" and f"{module}.{_SCALE}" in entries):
            folded[f"{module}.weight"] = _folded(name, entries, scheme)
        elif kind not in _BESIDE or not _is_beside(module, kind, entries):
            folded[name] = entry
    return folded


def declare_compressed(name: str, weight: TensorHeader, quantization: Mapping[str, object]) -> dict[str, TensorHeader]:
    """Return what the weight ``name`` rests as: the entries of which ``fold_compressed`` makes it again.

    Scales that aren't of a format's own kind are of the weight's dtype, as the library writes them.
    """
    if len(weight.shape) != 2 or not name.endswith(".weight"):
        return {name: weight}
    scheme, module = weight_scheme(quantization), name.removesuffix(".weight")
    rows, columns = weight.shape
    kinds, each = _REST[scheme.codes]
    if columns % each:
        raise CheckpointError(
            f"config.json: {name!r} has {columns} columns, which aren't a multiple of {each}; {_ADVICE}"
        )
    height, width = scheme.block_of(rows, columns)
    grid = (-(-rows // max(1, height)), -(-columns // max(1, width)))
    of_scales = _OF_FP4.get(scheme.strategy, (weight.dtype,)) if scheme.codes == "fp4" else (weight.dtype,)
    codes = TensorHeader(kinds[0], (rows, columns // each))
    stored = {f"{module}.{_PACKED if each > 1 else 'weight'}": codes}
    stored[f"{module}.{_SCALE}"] = TensorHeader(of_scales[0], (1,) if scheme.strategy == "tensor" else grid)
    if scheme.strategy == "tensor_group":
        stored[f"{module}.{_GLOBAL}"] = TensorHeader("float32", (1,))
    return stored


_ADVICE = "give a checkpoint with symmetric weights and no order of activations, or one in its original dtype"


def _is_beside(module: str, kind: str, entries: Mapping[str, Extent]) -> bool:
    """Return whether a tensor of this ``kind`` belongs to a weight; a ``CheckpointError`` where it needs one."""
    if kind != _SCALE or any(f"{module}.{codes}" in entries for codes in ("weight", _PACKED)):
        return True
    entry = entries[f"{module}.{kind}"]
    raise misfit(entry, f"tensor {module + '.' + kind!r} is a scale without a weight")


def _folded(name: str, entries: Mapping[str, Extent], scheme: WeightScheme) -> PackedTensor:
    codes, module = entries[name], name.rpartition(".")[0]
    scales = entries.get(f"{module}.{_SCALE}")
    if scales is None:
        raise misfit(codes, f"tensor {name!r} has no {_SCALE} beside it")
    kinds, each = _REST[scheme.codes]
    if codes.dtype not in kinds or len(codes.shape) != 2:
        raise _unfit(name, codes, f"{' or '.join(kinds)} [rows, columns{f' / {each}' if each > 1 else ''}]")
    rows, columns = codes.shape[0], codes.shape[1] * each
    if each > 1:
        _refuse_padding(name, codes, entries.get(f"{module}.{_SHAPE}"), columns)
    height, width = scheme.block_of(rows, columns)
    grid = (-(-rows // max(1, height)), -(-columns // max(1, width)))
    of_scales = _OF_FP4.get(scheme.strategy, ()) if scheme.codes == "fp4" else _SCALES
    is_whole = scheme.strategy == "tensor" and math.prod(scales.shape) == 1
    if scales.dtype not in of_scales or not (is_whole or scales.shape == grid):
        raise _unfit(f"{module}.{_SCALE}", scales, f"{' or '.join(of_scales) or 'nothing'} {list(grid)}")
    dtypes = DTYPES if scales.dtype == "float32" else (scales.dtype if scheme.codes != "fp4" else "bfloat16",)
    parts = (codes, replace(scales, shape=grid), *_global_scale(module, entries, scheme))
    return PackedTensor(ScaledCodes(scheme.codes, height, width, dtypes), parts, dtypes[0], (rows, columns))


def _refuse_padding(name: str, codes: Extent, shape: Extent | None, columns: int) -> None:
    """Refuse codes whose rows were filled up to whole numbers: ``shape`` is where the weight's own shape is said."""
    if shape is None or (shape.dtype, math.prod(shape.shape)) not in ((f"int{bits}", 2) for bits in (32, 64)):
        return
    said = bytearray(shape.bytes)
    with opened_shard(shape.file) as descriptor:
        read_into(descriptor, memoryview(said), offset=shape.begin, path=shape.file.path)
    wanted = struct.unpack(f"<2{'q' if shape.dtype == 'int64' else 'i'}", said)[1]
    if 0 < wanted < columns:
        raise CheckpointError(
            f"{codes.file.path}: tensor {name!r}: rows of {wanted} codes that are filled up to {columns} aren't served;"
            " give a checkpoint whose columns are a multiple of eight, or one in its original dtype"
        )


def _global_scale(module: str, entries: Mapping[str, Extent], scheme: WeightScheme) -> tuple[Extent, ...]:
    """Return what all scales of a weight are divided by, which NVFP4 has."""
    if scheme.strategy != "tensor_group":
        return ()
    name = f"{module}.{_GLOBAL}"
    if name not in entries:
        raise misfit(entries[f"{module}.{_SCALE}"], f"there is no {name!r}")
    if entries[name].dtype != "float32" or math.prod(entries[name].shape) != 1:
        raise _unfit(name, entries[name], "float32 [1]")
    return (replace(entries[name], shape=(1,)),)


def _unfit(name: str, entry: Extent, wanted: str) -> CheckpointError:
    return misfit(entry, f"tensor {name!r} is {entry.dtype} {list(entry.shape)} where {wanted} belongs")
