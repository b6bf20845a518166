"""Which entries of a quantised checkpoint make one tensor of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from offstage.stages.checkpoints.codecs.bitsandbytes import declare_bitsandbytes, fold_bitsandbytes
from offstage.stages.checkpoints.codecs.compressed_tensors import declare_compressed, fold_compressed
from offstage.stages.checkpoints.codecs.fp8_weights import declare_fp8, fold_fp8
from offstage.stages.checkpoints.codecs.grouped_scheme import AWQ, GPTQ
from offstage.stages.checkpoints.codecs.grouped_weights import declare_grouped, fold_grouped
from offstage.stages.checkpoints.codecs.mxfp4 import declare_mxfp4, fold_mxfp4
from offstage.stages.checkpoints.extents import Extent, TensorHeader
from offstage.stages.checkpoints.packed import AtRest
from offstage.stages.checkpoints.quantization import BITSANDBYTES, COMPRESSED, FP8, MXFP4, MXFP8, method_of

Fold = Callable[[Mapping[str, Extent], Mapping[str, object]], Mapping[str, AtRest]]
Declare = Callable[[str, TensorHeader, Mapping[str, object]], Mapping[str, TensorHeader]]

METHODS: Mapping[str, tuple[Fold, Declare]] = {
    FP8: (fold_fp8, declare_fp8),
    MXFP8: (fold_fp8, declare_fp8),
    MXFP4: (fold_mxfp4, declare_mxfp4),
    COMPRESSED: (fold_compressed, declare_compressed),
    BITSANDBYTES: (fold_bitsandbytes, declare_bitsandbytes),
    GPTQ: (fold_grouped, declare_grouped),
    AWQ: (fold_grouped, declare_grouped),
}
"""What makes one tensor of a weight and what belongs to it, by the method that quantised them; and what they rest as by
what a config declares, where there are no files yet."""


def logical_entries(entries: Mapping[str, Extent], quantization: Mapping[str, object] | None) -> Mapping[str, AtRest]:
    """Return the tensors that the model has of ``entries``: each packed weight as one, its scales as none.

    ``quantization`` is what the checkpoint's config says of it. A ``CheckpointError`` names the tensor whose parts
    don't belong together.
    """
    if quantization is None or method_of(quantization) not in METHODS:
        return entries
    fold, _ = METHODS[method_of(quantization)]
    return fold(entries, quantization)
