"""From floats to what they rest in once quantised: the formats of the key ``model.quantize``, by torch's operators.

Each is a format that makers of checkpoints write too, so that what comes of it is read, planned, streamed and
multiplied by what serves theirs. Values are quantised from float32, whatever they rest in and a run uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offstage.stages.checkpoints.codecs.fp8_weights import SCALE, declare_fp8, fold_fp8
from offstage.stages.checkpoints.codecs.ggml_formats import FORMATS
from offstage.stages.checkpoints.codecs.ggml_packing import PACK, largest_magnitudes
from offstage.stages.checkpoints.codecs.gguf import GgufCodec
from offstage.stages.checkpoints.codecs.loops import LANES
from offstage.stages.checkpoints.extents import Extent, TensorHeader
from offstage.stages.checkpoints.packed import AtRest, PackedTensor

FLOATS = ("float32", "bfloat16", "float16")
"""What can be quantised."""


class Quantiser(Protocol):
    """How the matrices of one format are made, and what they rest as."""

    @property
    def rows_together(self) -> int:
        """How many rows of a matrix are quantised together: what is read of it begins at a multiple of these."""

    def fits(self, weight: TensorHeader) -> bool:
        """Return whether the matrices ``weight`` (…, rows, columns) can be quantised."""

    def parts(self, name: str, weight: TensorHeader) -> Mapping[str, TensorHeader]:
        """Return what the matrices ``name`` rest as, the bulk first."""

    def packed(self, name: str, weight: TensorHeader, parts: Mapping[str, Extent]) -> AtRest:
        """Return the matrices that lie in ``parts``."""

    def quantise(self, values: Tensor) -> Sequence[Tensor]:
        """Return the bytes of each part of some rows of one matrix (rows, columns), float32, which are used up.

        An ``OverflowError`` where they have a NaN or an infinity, or are too large for the format.
        """


@dataclass(frozen=True, slots=True)
class GgmlBlocks:
    """One of llama.cpp's formats, ``narrow`` where rows are whole runs of 32 values but not of what ``kind`` takes.

    The bytes of Q8_0 are those that the ``gguf`` package writes: a float16 scale, and a code of eight bits for each of
    32 values. A value is off by half a step at most, of 127 to the largest of its block, and by what the scale loses
    in float16. The others have scales of the least squares (``ggml_packing``).
    """

    kind: str
    narrow: str
    rows_together = 1

    def fits(self, weight: TensorHeader) -> bool:
        """Return whether rows are whole blocks."""
        return _are_rows_of(FORMATS[self.narrow].elements, weight)

    def parts(self, name: str, weight: TensorHeader) -> Mapping[str, TensorHeader]:
        """Return rows of blocks, as bytes."""
        form = FORMATS[self._kind_for(weight.shape[-1])]
        return {name: TensorHeader("uint8", (*weight.shape[:-1], weight.shape[-1] // form.elements * form.bytes))}

    def packed(self, name: str, weight: TensorHeader, parts: Mapping[str, Extent]) -> AtRest:
        """Return them as a tensor of a GGUF file in the model's own order."""
        codec = GgufCodec((self._kind_for(weight.shape[-1]),))
        return PackedTensor(codec, (parts[name],), "float32", weight.shape)

    def quantise(self, values: Tensor) -> Sequence[Tensor]:
        """Return the blocks."""
        kind = self._kind_for(values.shape[-1])
        return (PACK[kind](_numbers(values).view(-1, FORMATS[kind].elements)).view(-1),)

    def _kind_for(self, columns: int) -> str:
        return self.kind if columns % FORMATS[self.kind].elements == 0 else self.narrow


class Fp8Blocks:
    """FP8 (e4m3fn) with a float32 scale for each block of 128 rows and columns, as DeepSeek writes it.

    The last blocks of a matrix may be cut short. The largest value of a block is the largest code, 448; a value is off
    by a sixteenth of it at most, and by 2^-10 of the scale where it is that small.
    """

    rows_together = 128
    _declared: Mapping[str, object] = {"quant_method": "fp8", "weight_block_size": [rows_together, rows_together]}
    _largest = 448.0

    def fits(self, weight: TensorHeader) -> bool:
        """Return whether rows are whole runs of what products add up together."""
        return _are_rows_of(LANES, weight)

    def parts(self, name: str, weight: TensorHeader) -> Mapping[str, TensorHeader]:
        """Return codes, and their scales."""
        return declare_fp8(name, weight, self._declared)

    def packed(self, name: str, weight: TensorHeader, parts: Mapping[str, Extent]) -> AtRest:
        """Return them as weights of an FP8 checkpoint."""
        return fold_fp8({key: parts[key] for key in (name, name + SCALE)}, self._declared)[name]

    def quantise(self, values: Tensor) -> Sequence[Tensor]:
        """Return the codes of the rows, and the scales of their blocks."""
        rows, columns = values.shape
        side = self.rows_together
        down, across = -(-rows // side), -(-columns // side)
        if (down * side, across * side) != (rows, columns):
            values = torch.nn.functional.pad(values, (0, across * side - columns, 0, down * side - rows))
        blocks = _numbers(values).view(down, side, across, side)
        scales = largest_magnitudes(blocks, (1, 3)).div_(self._largest)
        scales = torch.where(scales == 0, 1, scales)
        blocks.div_(scales[:, None, :, None]).clamp_(-self._largest, self._largest)
        codes = values[:rows, :columns].to(torch.float8_e4m3fn)
        return codes.contiguous().view(torch.uint8).view(-1), scales.view(torch.uint8).view(-1)


def _are_rows_of(run: int, weight: TensorHeader) -> bool:
    """Return whether ``weight`` is matrices of floats whose rows are whole runs of so many."""
    matrices = len(weight.shape) > 1 and 0 not in weight.shape
    return matrices and weight.dtype in FLOATS and weight.shape[-1] % run == 0


def _numbers(values: Tensor) -> Tensor:
    """Return ``values``. An ``OverflowError`` where any is none."""
    if not bool(torch.isfinite(values).all()):
        raise OverflowError("NaN or infinity")
    return values


QUANTISERS: Mapping[str, Quantiser] = {
    "q8_0": GgmlBlocks("q8_0", "q8_0"),
    "q6_k": GgmlBlocks("q6_k", "q8_0"),
    "q5_k": GgmlBlocks("q5_k", "q5_1"),
    "q4_k": GgmlBlocks("q4_k", "q4_1"),
    "fp8": Fp8Blocks(),
}
"""By the names that ``model.quantize`` has for them (``offstage.stages.checkpoints.quantization.QUANTISES``)."""
