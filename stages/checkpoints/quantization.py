"""What a checkpoint's config says of how its weights are quantised. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from offstage.pipeline.errors import CheckpointError
from offstage.pipeline.regular_files import read_object
from offstage.stages.checkpoints.codecs.compressed_scheme import weight_scheme
from offstage.stages.checkpoints.codecs.grouped_scheme import AWQ, GPTQ, grouped_scheme

KEYS = ("quantization_config", "compression_config")
"""The keys of a ``config.json`` that say that weights are stored as numbers which mean something else."""

FP8, MXFP8, MXFP4, COMPRESSED, BITSANDBYTES = "fp8", "mxfp8", "mxfp4", "compressed-tensors", "bitsandbytes"
SERVED = (FP8, MXFP8, MXFP4, COMPRESSED, BITSANDBYTES, GPTQ, AWQ)
"""The methods (``quant_method``) whose weights are unpacked as they are used; see ``check_scheme``."""

QUANTISES = ("q8_0", "q6_k", "q5_k", "q4_k", "fp8")
"""The formats that a plain checkpoint is quantised to where ``model.quantize`` asks for one."""

_BY_TRANSFORMERS = (BITSANDBYTES, "higgs")
"""The methods whose models transformers can dequantise as a whole."""


def quantization_of(folder: Path) -> Mapping[str, object] | None:
    """Return what the ``config.json`` in ``folder`` says of how weights are quantised; null if nothing."""
    config = read_object(folder / "config.json")
    nested = config.get("text_config")
    places = (config, nested if isinstance(nested, Mapping) else {})
    declared = (place[KEYS[0]] for place in places if isinstance(place.get(KEYS[0]), Mapping) and place[KEYS[0]])
    return next(declared, None)


def method_of(quantization: object) -> str:
    """Return the name of the method that a config declares by ``quantization``."""
    named = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    return str(named or "none is named")[:40]


def check_scheme(quantization: Mapping[str, object]) -> None:
    """Raise a ``CheckpointError`` that says what isn't served of a method of which other schemes are."""
    method = method_of(quantization)
    if method == COMPRESSED:
        weight_scheme(quantization)
    if method in (GPTQ, AWQ):
        grouped_scheme(quantization)
    if method == BITSANDBYTES and not any(quantization.get(key) for key in ("load_in_4bit", "_load_in_4bit")):
        raise CheckpointError(
            f"quantised weights (quant_method: {method!r}) in other than four bits, which aren't served; "
            f"{advice_for(method)}"
        )


def advice_for(method: str) -> str:
    """Return what to do with a checkpoint that is quantised by ``method``, which isn't served."""
    first = "give the checkpoint in its original dtype"
    if method in _BY_TRANSFORMERS:
        return f"{first}, or load this one with transformers, call dequantize() and save_pretrained() the model"
    return f"{first}, or one quantised by a method that is ({', '.join(SERVED)})"
