"""Which entries of an FP8 checkpoint are one weight: the codes, and the scales that its makers named by rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.codecs.scaled_codes import SCALE_DTYPES, ScaledCodes
from offstage.stages.checkpoints.extents import Extent, TensorHeader, misfit
from offstage.stages.checkpoints.packed import AtRest, PackedTensor

_FORMATS: Mapping[str, Literal["fp8", "fp4"]] = {"float8_e4m3fn": "fp8", "int8": "fp4"}
"""The dtypes of codes; FP4 has no dtype in the files."""

_UNSERVED = ("float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")

SCALE = "_scale_inv"
"""What the name of a weight has behind it where it is that of its scales."""
_ALIASES = (".scale", ".qscale_weight")
"""What some makers write for ``.weight_scale_inv``; transformers renames them."""

_OF_ACTIVATIONS = ("activation_scale", "qscale_act", "input_scale")
"""Scales of what is multiplied by a weight, which a weight in use has no use for."""


def fold_fp8(entries: Mapping[str, Extent], quantization: Mapping[str, object]) -> dict[str, AtRest]:
    """Return ``entries`` with each weight and its scales as one.

    A ``CheckpointError`` names the tensor that has no scale, no weight, or one that doesn't fit.
    """
    declared = _declared_block(quantization)
    scale_of = {name: scale for name in entries if (scale := _scale_name(name, entries)) is not None}
    consumed = {*scale_of.values(), *filter(_is_of_activations, entries)}
    folded: dict[str, AtRest] = {}
    for name, entry in entries.items():
        if name in consumed:
            continue
        if name in scale_of:
            folded[name] = _folded(name, entry, scale_of[name], entries[scale_of[name]], declared)
        else:
            _check_alone(name, entry)
            folded[name] = entry
    return folded


def declare_fp8(name: str, weight: TensorHeader, quantization: Mapping[str, object]) -> dict[str, TensorHeader]:
    """Return what the matrices ``name`` rest as: the entries of which ``fold_fp8`` makes them again.

    A config says the blocks, but not the dtype of their scales: those of FP8 are taken to be float32, the widest that
    are written, and those of MXFP8 bytes. A ``CheckpointError`` of codes that it doesn't lay out.
    """
    if quantization.get("expert_dtype", "fp8") != "fp8":
        dtype = str(quantization["expert_dtype"])[:40]
        raise CheckpointError(f"config.json: how experts in {dtype} lie is told by the weights alone; {_GIVE_THEM}")
    micro = quantization.get("quant_method") == "mxfp8"
    sizes = weight.shape[-2], weight.shape[-1]
    block = _declared_block(quantization) or (_MX_BLOCK if micro else sizes)
    grid = tuple(-(-size // max(1, step)) for size, step in zip(sizes, block, strict=True))
    scales = TensorHeader("uint8" if micro else "float32", (*weight.shape[:-2], *grid))
    return {name: TensorHeader("float8_e4m3fn", weight.shape), f"{name}{SCALE}": scales}


_GIVE_THEM = "give the folder that holds them"
_MX_BLOCK = (1, 32)


def _scale_name(name: str, entries: Mapping[str, Extent]) -> str | None:
    """Return what the scale of the weight ``name`` is called; null if it has none."""
    if f"{name}{SCALE}" in entries:
        return f"{name}{SCALE}"
    if not name.endswith(".weight") or entries[name].dtype not in _FORMATS:
        return None
    aliases = (name.removesuffix(".weight") + alias for alias in _ALIASES)
    return next((alias for alias in aliases if alias in entries), None)


def _is_of_activations(name: str) -> bool:
    return name.endswith(_OF_ACTIVATIONS)


def _declared_block(quantization: Mapping[str, object]) -> tuple[int, int] | None:
    match quantization.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case None:
            return None
        case other:
            raise CheckpointError(
                f"config.json: weight_block_size {str(other)[:40]!r}: two numbers above 0 belong here, or null"
            )


def _check_alone(name: str, entry: Extent) -> None:
    """Refuse an entry that means something only together with another one."""
    where = f"tensor {name!r} is"
    if entry.dtype in _UNSERVED:
        raise CheckpointError(f"{entry.file.path}: {where} {entry.dtype}; of FP8, float8_e4m3fn alone is served")
    if entry.dtype == "float8_e4m3fn":
        raise misfit(entry, f"{where} {entry.dtype} without a scale {name + SCALE!r}")
    if name.endswith((SCALE, _ALIASES[1])):
        raise misfit(entry, f"{where} a scale without a weight")


def _folded(
    name: str, codes: Extent, scale_name: str, scales: Extent, declared: tuple[int, int] | None
) -> PackedTensor:
    where = f"{scales.file.path}: tensor {scale_name!r}"
    if codes.dtype not in _FORMATS:
        raise CheckpointError(
            f"{where}: a scale of {name!r}, which is {codes.dtype}; weights with scales are {' or '.join(_FORMATS)}"
        )
    if scales.dtype not in SCALE_DTYPES:
        raise CheckpointError(f"{where} is {scales.dtype}; scales are {', '.join(SCALE_DTYPES)}")
    kind = _FORMATS[codes.dtype]
    shape = (*codes.shape[:-1], codes.shape[-1] * (2 if kind == "fp4" else 1)) if codes.shape else ()
    grid = _grid(shape, scales.shape)
    block = _block(shape, grid, declared) if grid else None
    if grid is None or block is None:
        raise CheckpointError(
            f"{where}: shape {list(scales.shape)} doesn't fit {name!r}, which is {list(shape)}: a scale for each "
            f"{'matrix, or part that divides it' if declared is None else f'block of {list(declared)}'} belongs here"
        )
    grid_extent = Extent(scales.file, scales.begin, scales.dtype, (*shape[:-2], *grid))
    return PackedTensor(ScaledCodes(kind, *block), (codes, grid_extent), "bfloat16", shape)


def _grid(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int] | None:
    """Return how many scales each matrix of ``shape`` has down and across; null where ``scales`` aren't for it."""
    if len(shape) < 2:
        return None
    matrices = math.prod(shape[:-2])
    if math.prod(scales) == matrices and (len(scales) < 2 or scales[-2:] == (1, 1)):
        return 1, 1
    if len(scales) < 2 or math.prod(scales[:-2]) != matrices:
        return None
    return scales[-2], scales[-1]


def _block(shape: tuple[int, ...], grid: tuple[int, int], declared: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale: those ``declared`` if the grid is theirs, else what divides."""
    sizes = shape[-2], shape[-1]
    if not all((*sizes, *grid)):
        return None
    if declared and grid == tuple(-(-size // step) for size, step in zip(sizes, declared, strict=True)):
        return min(declared[0], sizes[0]), min(declared[1], sizes[1])
    if any(size % count for size, count in zip(sizes, grid, strict=True)):
        return None
    return sizes[0] // grid[0], sizes[1] // grid[1]
