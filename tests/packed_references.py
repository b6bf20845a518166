"""Packed checkpoints as transformers loads them, to hold ours against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from transformers import modeling_utils
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers import quantizer_finegrained_fp8, quantizer_mxfp4


@contextmanager
def without_asking_for_accelerate() -> Iterator[None]:
    """Have transformers load packed checkpoints where accelerate isn't installed: it asks for it, and has no use for it
    where all goes to the host.
    """
    with ExitStack() as stack:
        for module in (modeling_utils, quantizer_finegrained_fp8, quantizer_mxfp4):
            stack.enter_context(patch.object(module, "is_accelerate_available", lambda *_: True))
        yield


def unpacked_fp8(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return what transformers makes of FP8 or FP4 codes.

    Asked by tensors: the patterns of names by which its loading asks are others in each version.
    """
    return Fp8Dequantize(None)._dequantize_one(codes, scales, dtype)
