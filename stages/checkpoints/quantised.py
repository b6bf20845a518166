"""Quantised checkpoints: what their config says of how weights rest, and which entries make one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pipeline.regular_files import read_object
from stages.checkpoints.codecs.fp8_weights import fold_fp8
from stages.checkpoints.codecs.mxfp4 import fold_mxfp4
from stages.checkpoints.extents import Extent
from stages.checkpoints.packed import AtRest

KEYS = ("quantization_config", "compression_config")
"""The keys of a ``config.json`` that say that weights are stored as numbers which mean something else."""

Fold = Callable[[Mapping[str, Extent], Mapping[str, object]], Mapping[str, AtRest]]

FOLDS: Mapping[str, Fold] = {"fp8": fold_fp8, "mxfp4": fold_mxfp4}
"""The methods (``quant_method``) that are served: each makes one tensor of a weight and what belongs to it."""


def quantization_of(folder: Path) -> Mapping[str, object] | None:
    """Return what the ``config.json`` in ``folder`` says of how weights are quantised; null if nothing."""
    config = read_object(folder / "config.json")
    nested = config.get("text_config")
    places = (config, nested if isinstance(nested, Mapping) else {})
    declared = (place[KEYS[0]] for place in places if isinstance(place.get(KEYS[0]), Mapping) and place[KEYS[0]])
    return next(declared, None)


def logical_entries(entries: Mapping[str, Extent], quantization: Mapping[str, object] | None) -> Mapping[str, AtRest]:
    """Return the tensors that the model has of ``entries``: each packed weight as one, its scales as none.

    ``quantization`` is what the checkpoint's config says of it. A ``CheckpointError`` names the tensor whose parts
    don't belong together.
    """
    fold = FOLDS.get(str((quantization or {}).get("quant_method")))
    return entries if fold is None or quantization is None else fold(entries, quantization)
