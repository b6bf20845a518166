"""Which entries of a checkpoint of GPTQ or of AWQ are one weight.

``X.weight`` rests as ``X.qweight``, ``X.scales`` and ``X.qzeros``; GPTQ has the group of each input beside them, in
``X.g_idx``. It is read as the checkpoint is opened: a group that isn't there is found before any work, and where
inputs are in order, as nearly always, no more is kept of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.codecs.grouped_integers import GroupedIntegers, codes_together
from offstage.stages.checkpoints.codecs.grouped_scheme import AWQ, GroupedScheme, grouped_scheme
from offstage.stages.checkpoints.extents import Extent, TensorHeader, misfit
from offstage.stages.checkpoints.packed import AtRest, MemoryFile, PackedTensor
from offstage.stages.checkpoints.packed_reads import read_span

_CODES, _SCALES, _ZEROS, _GROUPS = "qweight", "scales", "qzeros", "g_idx"
_BESIDE = (_SCALES, _ZEROS, _GROUPS)
_DTYPES = ("float16", "bfloat16", "float32")


def fold_grouped(entries: Mapping[str, Extent], quantization: Mapping[str, object]) -> dict[str, AtRest]:
    """Return ``entries`` with each weight and what it is unpacked by as one.

    A ``CheckpointError`` names the option or the tensor that isn't served, or what doesn't fit.
    """
    scheme = grouped_scheme(quantization)
    folded: dict[str, AtRest] = {}
    for name, entry in entries.items():
        module, _, kind = name.rpartition(".")
        if kind == _CODES:
            folded[f"{module}.weight"] = _GroupedWeight(module, entries, scheme).folded()
        elif kind not in _BESIDE or f"{module}.{_CODES}" not in entries:
            _check_alone(name, entry, entries)
            folded[name] = entry
    return folded


def _check_alone(name: str, entry: Extent, entries: Mapping[str, Extent]) -> None:
    """Refuse an entry that means something only with another one, or that another one means too."""
    module, _, kind = name.rpartition(".")
    if kind in (_ZEROS, _GROUPS):
        raise misfit(entry, f"tensor {name!r} needs {module + '.' + _CODES!r}, which isn't there")
    if kind == "weight" and f"{module}.{_CODES}" in entries:
        raise misfit(entry, f"{name!r} is there both quantised, as {module + '.' + _CODES!r}, and as it is")


def declare_grouped(name: str, weight: TensorHeader, quantization: Mapping[str, object]) -> dict[str, TensorHeader]:
    """Return what the matrix ``name`` rests as: the entries of which ``fold_grouped`` makes it again.

    Scales are of the weight's dtype, which are two bytes as the libraries write them. With ``desc_act`` inputs are
    taken to be in no order.
    """
    if len(weight.shape) != 2 or not name.endswith(".weight"):
        return {name: weight}
    scheme, module = grouped_scheme(quantization), name.removesuffix(".weight")
    outputs, inputs = weight.shape
    each, period = codes_together(scheme.bits)
    odd = outputs % each or (scheme.method != AWQ and inputs % each)
    if odd:
        raise CheckpointError(
            f"config.json: {name!r} is {list(weight.shape)}, and {scheme.method} packs {each} values of "
            f"{scheme.bits} bits together; give the folder that holds the weights"
        )
    packed = outputs // each * period
    groups = -(-inputs // (scheme.group or inputs))
    codes = (inputs, packed) if scheme.method == AWQ else (inputs // each * period, outputs)
    stored = {
        f"{module}.{_CODES}": TensorHeader("int32", codes),
        f"{module}.{_SCALES}": TensorHeader(weight.dtype if weight.dtype in _DTYPES else "float16", (groups, outputs)),
        f"{module}.{_ZEROS}": TensorHeader("int32", (groups, packed)),
    }
    if scheme.reordered:
        stored[f"{module}.{_GROUPS}"] = TensorHeader("int32", (inputs,), _made_up(inputs, groups))
    return stored


@lru_cache(maxsize=64)
def _made_up(inputs: int, groups: int) -> bytes:
    """Return groups of ``inputs`` in an order that isn't the usual one."""
    return (groups - 1 - np.arange(inputs, dtype=np.int32) % groups).tobytes()


@dataclass(frozen=True, slots=True)
class _GroupedWeight:
    """The packed weight of ``module`` among the checkpoint's ``entries``, as its config's ``scheme`` has it."""

    module: str
    entries: Mapping[str, Extent]
    scheme: GroupedScheme

    def folded(self) -> PackedTensor:
        """Return it; a ``CheckpointError`` names what doesn't fit."""
        codes, scheme = self.entries[f"{self.module}.{_CODES}"], self.scheme
        each, period = codes_together(scheme.bits)
        interleaved = scheme.method == AWQ
        if codes.dtype != "int32" or len(codes.shape) != 2 or not all(codes.shape):
            raise self._unfit(_CODES, f"int32 of two dimensions ({'inputs, ' if interleaved else ''}packed)")
        rows, columns = codes.shape
        inputs, outputs = (rows, columns * each) if interleaved else (rows // period * each, columns)
        if (rows % period and not interleaved) or outputs % each:
            raise self._unfit(_CODES, f"{each} values of {scheme.bits} bits together, in {period} numbers, belong")
        group = min(scheme.group or inputs, inputs)
        groups = -(-inputs // group)
        scales = self._part(_SCALES, _DTYPES, (groups, outputs))
        zeros = self._part(_ZEROS, ("int32",), (groups, outputs // each * period))
        order = self._order(inputs, groups, group)
        codec = GroupedIntegers(
            f"{scheme.method}{scheme.bits}", scheme.bits, group, order is not None, scheme.less_one, interleaved
        )
        parts = (codes, scales, zeros, *(() if order is None else (order,)))
        return PackedTensor(codec, parts, scales.dtype, (outputs, inputs))

    def _order(self, inputs: int, groups: int, group: int) -> Extent | None:
        """Return the group of each input, if these aren't in order; null too where there are none.

        Of what only the headers are here, the config says it.
        """
        if self.scheme.method == AWQ or f"{self.module}.{_GROUPS}" not in self.entries:
            if self.scheme.reordered:
                raise self._unfit(
                    _CODES, f"desc_act needs {self.module + '.' + _GROUPS!r} beside it, which isn't there"
                )
            return None
        extent = self._part(_GROUPS, ("int32",), (inputs,))
        if extent.file.mtime_ns is None and not isinstance(extent.file, MemoryFile):
            return extent if self.scheme.reordered else None
        data = np.empty(extent.bytes, np.uint8)
        read_span(extent, data.data)
        order = data.view(np.int32)
        if order.min() < 0 or order.max() >= groups:
            raise misfit(
                extent,
                f"tensor {self.module + '.' + _GROUPS!r} has {order.min()} to {order.max()}, where groups are 0 to "
                f"{groups - 1}",
            )
        return None if np.array_equal(order, np.arange(inputs, dtype=np.int32) // group) else extent

    def _part(self, kind: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> Extent:
        """Return the tensor ``kind`` of the weight, which must be of one of ``dtypes`` and of ``shape``."""
        extent = self.entries.get(f"{self.module}.{kind}")
        if extent is None:
            raise self._unfit(_CODES, f"needs {self.module + '.' + kind!r}, which isn't there")
        if extent.dtype not in dtypes or extent.shape != shape:
            raise self._unfit(kind, f"{' or '.join(dtypes)} {list(shape)} belongs")
        return extent

    def _unfit(self, kind: str, what: str) -> CheckpointError:
        extent = self.entries[f"{self.module}.{kind}"]
        received = f"tensor {self.module + '.' + kind!r} is {extent.dtype} {list(extent.shape)}"
        return misfit(extent, f"{received}: {what}")
