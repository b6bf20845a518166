"""From floats to what they rest in once quantised: the formats of the key ``model.quantize``, by torch's operators.

Each is a format that makers of checkpoints write too, so that what comes of it is read, planned, streamed and
multiplied by what serves theirs. Values are quantised from float32, whatever they rest in and a run uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from offstage.stages.checkpoints.codecs.fp8_weights import SCALE, declare_fp8, fold_fp8
from offstage.stages.checkpoints.codecs.ggml_formats import FORMATS
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

        They hold no finite scale where the values have a NaN or an infinity, or are too large: see ``are_sound``.
        """

    def are_sound(self, made: Sequence[Tensor]) -> bool:
        """Return whether what ``quantise`` made stands for numbers."""


class GgmlQ8:
    """Q8_0, as llama.cpp has it: 32 values of a row in 34 bytes, a float16 scale and a code of eight bits for each.

    The bytes are those that the ``gguf`` package writes. A value is off by half a step at most, of 127 to the largest
    of its block, and by what the scale loses in float16.
    """

    rows_together = 1
    _form = FORMATS["q8_0"]

    def fits(self, weight: TensorHeader) -> bool:
        """Return whether rows are whole blocks."""
        return _are_rows_of(self._form.elements, weight)

    def parts(self, name: str, weight: TensorHeader) -> Mapping[str, TensorHeader]:
        """Return rows of blocks, as bytes."""
        width = weight.shape[-1] // self._form.elements * self._form.bytes
        return {name: TensorHeader("uint8", (*weight.shape[:-1], width))}

    def packed(self, name: str, weight: TensorHeader, parts: Mapping[str, Extent]) -> AtRest:
        """Return them as a tensor of a GGUF file in the model's own order."""
        return PackedTensor(GgufCodec(("q8_0",)), (parts[name],), "float32", weight.shape)

    def quantise(self, values: Tensor) -> Sequence[Tensor]:
        """Return the blocks."""
        blocks = values.view(-1, self._form.elements)
        scales = _largest(blocks, (1,), keepdim=True).div_(127)
        smallest = torch.finfo(torch.float32).tiny  # what is less has no inverse, and is zero as float16
        blocks *= torch.where(scales < smallest, 0, 1 / scales)
        whole = blocks.to(torch.int8)
        codes = whole + blocks.sub_(whole).mul_(2).to(torch.int8)  # halves away from zero
        packed = torch.empty((len(blocks), self._form.bytes), dtype=torch.uint8)
        packed[:, :2] = scales.half().view(torch.uint8)
        packed[:, 2:] = codes.view(torch.uint8)
        return (packed.view(-1),)

    def are_sound(self, made: Sequence[Tensor]) -> bool:
        """Return whether all scales are finite."""
        scales = made[0].view(-1, self._form.bytes)[:, :2].contiguous().view(torch.float16)
        return bool(torch.isfinite(scales).all())


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
        blocks = values.view(down, side, across, side)
        scales = _largest(blocks, (1, 3)).div_(self._largest)
        scales = torch.where(scales == 0, 1, scales)
        blocks.div_(scales[:, None, :, None]).clamp_(-self._largest, self._largest)
        codes = values[:rows, :columns].to(torch.float8_e4m3fn)
        return codes.contiguous().view(torch.uint8).view(-1), scales.view(torch.uint8).view(-1)

    def are_sound(self, made: Sequence[Tensor]) -> bool:
        """Return whether all scales are finite."""
        return bool(torch.isfinite(made[1].view(torch.float32)).all())


def _are_rows_of(run: int, weight: TensorHeader) -> bool:
    """Return whether ``weight`` is matrices of floats whose rows are whole runs of so many."""
    matrices = len(weight.shape) > 1 and 0 not in weight.shape
    return matrices and weight.dtype in FLOATS and weight.shape[-1] % run == 0


def _largest(values: Tensor, dims: tuple[int, ...], *, keepdim: bool = False) -> Tensor:
    """Return the largest magnitudes along ``dims``, without a copy of all."""
    low, high = (reduced(values, dims, keepdim) for reduced in (torch.amin, torch.amax))
    return torch.maximum(high, -low).abs_()  # of zeros it may be a negative one


QUANTISERS: Mapping[str, Quantiser] = {"q8_0": GgmlQ8(), "fp8": Fp8Blocks()}
"""By the names that ``model.quantize`` has for them (``offstage.stages.checkpoints.quantization.QUANTISES``)."""
