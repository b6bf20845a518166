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

FOLDS: Mapping[str, Fold] = {
    FP8: fold_fp8,
    MXFP8: fold_fp8,
    MXFP4: fold_mxfp4,
    COMPRESSED: fold_compressed,
    BITSANDBYTES: fold_bitsandbytes,
    GPTQ: fold_grouped,
    AWQ: fold_grouped,
}
"""What makes one tensor of a weight and what belongs to it, by the method that quantised them."""


Declare = Callable[[str, TensorHeader, Mapping[str, object]], Mapping[str, TensorHeader]]

DECLARES: Mapping[str, Declare] = {
    FP8: declare_fp8,
    MXFP8: declare_fp8,
    MXFP4: declare_mxfp4,
    COMPRESSED: declare_compressed,
    BITSANDBYTES: declare_bitsandbytes,
    GPTQ: declare_grouped,
    AWQ: declare_grouped,
}
"""What a weight and what belongs to it rest as, by the method that a config declares: where there are no files yet."""


def logical_entries(entries: Mapping[str, Extent], quantization: Mapping[str, object] | None) -> Mapping[str, AtRest]:
    """Return the tensors that the model has of ``entries``: each packed weight as one, its scales as none.

    ``quantization`` is what the checkpoint's config says of it. A ``CheckpointError`` names the tensor whose parts
    don't belong together.
    """
    fold = FOLDS.get(method_of(quantization)) if quantization else None
    return entries if fold is None or quantization is None else fold(entries, quantization)
