"""Which entries of gpt-oss' checkpoints are one stack of experts in MXFP4.

At rest a stack is ``X_blocks`` [experts, rows, groups, 16], two values a byte, the low one first, and ``X_scales``
[experts, rows, groups], exponents with 127 added. In use it is ``X`` [experts, 32 · groups, rows]: transposed.
"""

from __future__ import annotations

from collections.abc import Mapping

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.codecs.scaled_codes import MXFP4, MXFP4_GROUP
from offstage.stages.checkpoints.extents import Extent, TensorHeader, misfit
from offstage.stages.checkpoints.packed import AtRest, PackedTensor

STACKS = ("gate_up_proj", "down_proj")
"""What the parameters are called that transformers unpacks."""

_GROUP_BYTES = MXFP4_GROUP // 2


def fold_mxfp4(entries: Mapping[str, Extent], quantization: Mapping[str, object]) -> dict[str, AtRest]:
    """Return ``entries`` with one packed tensor in the place of each stack's blocks and scales.

    All that ``quantization``, the config's, says beside the method is told by the names. A ``CheckpointError`` names
    the tensor that isn't what the other one needs.
    """
    stacks = {name: stack for name in entries if (stack := _stack_of(name))}
    folded: dict[str, AtRest] = {name: extent for name, extent in entries.items() if name not in stacks}
    for name, stack in stacks.items():
        if f"{stack}_blocks" not in entries:
            raise misfit(entries[name], f"{name!r} has no {stack + '_blocks'!r} beside it")
        folded[stack] = _folded(entries, stack)
    return folded


def declare_mxfp4(name: str, weight: TensorHeader, quantization: Mapping[str, object]) -> dict[str, TensorHeader]:
    """Return what the stack ``name`` rests as: the entries of which ``fold_mxfp4`` makes it again.

    What isn't such a stack stays as it is, whatever ``quantization`` says beside the method.
    """
    if name.rpartition(".")[2] not in STACKS or len(weight.shape) != 3:
        return {name: weight}
    experts, columns, rows = weight.shape
    if columns % MXFP4_GROUP:
        raise CheckpointError(
            f"config.json: {name!r} has {columns} values in a row, and mxfp4 a scale for each {MXFP4_GROUP}"
        )
    groups = columns // MXFP4_GROUP
    blocks = TensorHeader("uint8", (experts, rows, groups, _GROUP_BYTES))
    return {f"{name}_blocks": blocks, f"{name}_scales": TensorHeader("uint8", (experts, rows, groups))}


def _stack_of(name: str) -> str | None:
    """Return the stack that the tensor ``name`` is the blocks or the scales of; null for all others."""
    stack, _, kind = name.rpartition("_")
    return stack if kind in ("blocks", "scales") and stack.rpartition(".")[2] in STACKS else None


def _folded(entries: Mapping[str, Extent], stack: str) -> PackedTensor:
    blocks, scales = entries[f"{stack}_blocks"], entries.get(f"{stack}_scales")
    if scales is None:
        raise misfit(blocks, f"{stack + '_blocks'!r} has no {stack + '_scales'!r} beside it")
    if stack in entries:
        raise misfit(blocks, f"{stack!r} is there both in blocks and as it is")
    for extent, shape in ((blocks, (*blocks.shape[:3], _GROUP_BYTES)), (scales, blocks.shape[:3])):
        if len(blocks.shape) != 4 or extent.dtype != "uint8" or extent.shape != shape:
            each = " and ".join(f"{part.dtype} {list(part.shape)}" for part in (blocks, scales))
            raise misfit(
                extent,
                f"the blocks and scales of {stack!r} are {each}, where mxfp4 has uint8 [experts, rows, groups, 16] "
                "and the same without the 16",
            )
    experts, rows, groups, _ = blocks.shape
    return PackedTensor(MXFP4, (blocks, scales), "bfloat16", (experts, groups * MXFP4_GROUP, rows))
