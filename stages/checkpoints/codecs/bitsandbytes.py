"""Which entries of a checkpoint of the library bitsandbytes, in four bits, are one weight.

Beside the codes ``X`` lie ``X.absmax``, their scales, ``X.quant_map``, the values that they stand for, and a JSON text
that says the weight's shape and dtype. Scales that are packed too have both beside them again (``nested_…``). What is
small is read as the checkpoint is opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.codecs.scaled_codes import DTYPES, RUNS, PackedScales, table_codes
from offstage.stages.checkpoints.extents import Extent, TensorHeader, is_shape, misfit
from offstage.stages.checkpoints.packed import AtRest, PackedTensor
from offstage.stages.checkpoints.packed_reads import read_span

_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_MAP, _SCALES = ".quant_map", ".absmax"
_NESTED_MAP, _NESTED_SCALES = ".nested_quant_map", ".nested_absmax"
_MOST_TEXT = 2**14
"""What such a JSON text takes at most; the library's are of 200 bytes."""
_RUN, _NESTED_RUN = 64, 256
"""How many values share a scale, and how many scales one of their own, as the library writes them by default."""
_DTYPES = ("bfloat16", "float16", "float32")


def fold_bitsandbytes(entries: Mapping[str, Extent], quantization: Mapping[str, object]) -> dict[str, AtRest]:
    """Return ``entries`` with each weight and what it is unpacked by as one.

    Each weight tells all itself, beside ``quantization``. A ``CheckpointError`` names what isn't as it must be.
    """
    states = {name.removesuffix(state): name for name in entries for state in _STATES if name.endswith(state)}
    of_weights = {f"{name}{part}" for name in states for part in (_MAP, _SCALES, _NESTED_MAP, _NESTED_SCALES)}
    consumed = {*of_weights, *states.values()}
    folded: dict[str, AtRest] = {}
    for name, entry in entries.items():
        if name in states:
            folded[name] = _Weight(name, states[name], entries).folded()
        elif name not in consumed:
            _check_alone(name, entry)
            folded[name] = entry
    for name in states.keys() - entries.keys():
        raise misfit(entries[states[name]], f"tensor {states[name]!r} is of {name!r}, which isn't there")
    return folded


def declare_bitsandbytes(
    name: str, weight: TensorHeader, quantization: Mapping[str, object]
) -> dict[str, TensorHeader]:
    """Return what the matrix ``name`` rests as: the entries of which ``fold_bitsandbytes`` makes it again.

    A config doesn't say how many values share a scale: these are as many as the library takes if nobody says otherwise.
    The values of the tables don't matter to a plan.
    """
    if len(weight.shape) != 2:
        return {name: weight}
    count = math.prod(weight.shape)
    state: dict[str, object] = {"blocksize": _RUN, "dtype": weight.dtype, "shape": list(weight.shape)}
    runs, nested = count // _RUN, bool(quantization.get("bnb_4bit_use_double_quant"))
    stored = {
        name: TensorHeader("uint8", (-(-count // 2), 1)),
        f"{name}{_MAP}": TensorHeader("float32", (16,), bytes(4 * 16)),
        f"{name}{_SCALES}": TensorHeader("uint8" if nested else "float32", (runs,)),
    }
    if nested:
        state |= {"nested_blocksize": _NESTED_RUN, "nested_dtype": "float32", "nested_offset": 0.0}
        stored[f"{name}{_NESTED_SCALES}"] = TensorHeader("float32", (-(-runs // _NESTED_RUN),))
        stored[f"{name}{_NESTED_MAP}"] = TensorHeader("float32", (256,), bytes(4 * 256))
    text = json.dumps(state).encode()
    return {**stored, f"{name}{_STATES[0]}": TensorHeader("uint8", (len(text),), text)}


def _check_alone(name: str, entry: Extent) -> None:
    if name.endswith((_MAP, _SCALES, _NESTED_MAP, _NESTED_SCALES)) or (
        entry.dtype == "uint8" and name.endswith(".weight")
    ):
        raise misfit(entry, f"tensor {name!r} is part of a quantised weight that has no {_STATES[0][1:]!r} or the like")


@dataclass(frozen=True, slots=True)
class _Weight:
    """A packed weight by its ``name``, and what its ``state`` says of it among the checkpoint's ``entries``."""

    name: str
    state: str
    entries: Mapping[str, Extent]

    def folded(self) -> PackedTensor:
        state = self._told()
        codes, shape = self.entries[self.name], state.get("shape")
        run, dtype, nested = state.get("blocksize"), str(state.get("dtype")), "nested_offset" in state
        if not is_shape(shape) or not shape or not _is_run(run) or dtype not in _DTYPES:
            raise self._unfit(f"says shape {shape}, blocksize {run}, dtype {dtype}")
        count = math.prod(shape)
        if codes.dtype != "uint8" or math.prod(codes.shape) * 2 != count or count % run:
            raise self._unfit(
                f"says shape {shape} in runs of {run}, where the codes are {codes.dtype} {list(codes.shape)}"
            )
        scales = self._part(_SCALES, "uint8" if nested else "float32", count // run)
        above = self._nested_scales(state, count // run) if nested else None
        parts = (codes, scales, *((above[1],) if above else ()))
        dtypes = DTYPES if dtype == "float32" else (dtype,)
        values = self._values(_MAP, 16)
        return PackedTensor(table_codes(values, run, above[0] if above else None, dtypes), parts, dtype, tuple(shape))

    def _nested_scales(self, state: Mapping[str, Any], count: int) -> tuple[PackedScales, Extent]:
        run, offset = state.get("nested_blocksize"), state["nested_offset"]
        if not _is_run(run) or not isinstance(offset, float) or state.get("nested_dtype", "float32") != "float32":
            raise self._unfit(f"says nested_blocksize {run}, nested_offset {str(offset)[:40]}")
        above = self._part(_NESTED_SCALES, "float32", -(-count // run))
        return PackedScales(self._values(_NESTED_MAP, 256), run, offset), above

    def _told(self) -> dict[str, Any]:
        """Return what the JSON text says."""
        extent = self.entries[self.state]
        if extent.dtype != "uint8" or extent.bytes > _MOST_TEXT:
            raise self._unfit(f"is {extent.dtype} {list(extent.shape)}, where a JSON text of some 200 bytes belongs")
        try:
            state = json.loads(_read(extent).tobytes())
        except (ValueError, RecursionError) as error:
            raise self._unfit("is no JSON text") from error
        if not isinstance(state, dict):
            raise self._unfit("is no JSON object")
        return state

    def _values(self, part: str, count: int) -> tuple[float, ...]:
        return tuple(_read(self._part(part, "float32", count)).view(np.float32).tolist())

    def _part(self, part: str, dtype: str, count: int) -> Extent:
        """Return the tensor ``part`` of the weight, which must have ``count`` numbers of ``dtype``."""
        extent = self.entries.get(f"{self.name}{part}")
        if extent is None:
            raise self._unfit(f"needs {self.name + part!r}, which isn't there")
        if extent.dtype != dtype or math.prod(extent.shape) != count:
            raise misfit(
                extent,
                f"tensor {self.name + part!r} is {extent.dtype} {list(extent.shape)} where {count} of {dtype} belong",
            )
        return extent

    def _unfit(self, what: str) -> CheckpointError:
        return misfit(self.entries[self.state], f"tensor {self.state!r} {what}")


def _is_run(value: object) -> TypeGuard[int]:
    return type(value) is int and value in RUNS


def _read(extent: Extent) -> np.ndarray[Any, np.dtype[np.uint8]]:
    data = np.empty(extent.bytes, np.uint8)
    read_span(extent, data.data)
    return data
