"""Whether streamed weights are packed losslessly, and how far they shrink: the key ``storage.codec``.

A packed copy is made once and read for every token after it. A plan needs its size before there is one: a few stretches
of the checkpoint, always the same ones, say how far its floats shrink. They are packed once for a checkpoint's content:
what they came to is kept beside the figures of the machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from offstage.pipeline.cache.fingerprint import fingerprint
from offstage.pipeline.errors import CheckpointError
from offstage.pipeline.stage import MEASURED, Config
from offstage.stages.checkpoints.adapters import is_added
from offstage.stages.checkpoints.checkpoint import Checkpoint, identity, open_checkpoint
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.shard_files import opened_shard, read_into
from offstage.stages.empty_init.skeleton import PackedSpec
from offstage.stages.machine.kept_figures import kept_figure
from offstage.stages.machine.probes import READERS, READING_THREADS
from offstage.stages.plan.options import StorageConfig
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.request.requests import what_learns
from offstage.stages.units import DTYPE_BYTES

NAME, FILE_NAME = "zstd", "packing.json"
NOMINAL = {"bfloat16": 0.67, "float16": 0.84, "float32": 0.84}
"""The share of their bytes that weights are packed to which are about normally distributed."""
_STRETCHES = 16
_ELEMENTS = 2**15
_SCRATCH_BYTES = 2**20
"""What unpacking takes beside the block: what of it reads are aligned by, a plane of a tile, what zstandard keeps."""


Shares = Mapping[str, float]
"""By dtype the share of their bytes that floats are packed to."""


def possible_packing(
    asked: StorageConfig, outline: Outline, config: Config, cache: Path | None = None
) -> Shares | None:
    """Return how far the floats of ``outline`` can be packed where the key ``storage.codec`` has it; null where not.

    Where all weights learn none of them rests on disk. What the checkpoint's stretches came to is kept in ``cache``.
    """
    if asked.codec == "none" or asked.io == "mmap" or what_learns(config) == "all":
        return None
    from offstage.stages.checkpoints.codecs.planes import (
        can_pack,  # here and below: a run that packs nothing needs none of it
    )

    dtypes = sorted({spec.dtype for spec in outline.skeleton.tensors if can_pack(spec.dtype, spec.bytes)})
    checkpoint = _opened(config) if dtypes else None
    if checkpoint is None:
        return {dtype: NOMINAL[dtype] for dtype in dtypes} if dtypes else None
    probe, shares = partial(_shares, checkpoint, dtypes), None
    if cache is not None:
        key = fingerprint([_STRETCHES, _ELEMENTS, dtypes, identity(checkpoint)])
        shares = kept_figure(cache / MEASURED, FILE_NAME, key, probe)
    return dict(zip(dtypes, shares or probe(), strict=True))


def with_copies(outline: Outline, packing: Shares | None) -> Outline:
    """Return ``outline`` with those tensors resting packed that may.

    What is looked up by rows stays as it is, and so do adapters, which may learn.
    """
    if packing is None:
        return outline
    from offstage.stages.checkpoints.codecs.planes import can_pack

    skeleton = outline.skeleton
    plain = {name for group in map(skeleton.names_of, outline.lookups) for name in group} | outline.computed
    tensors = tuple(
        replace(spec, packed=_packed(spec.bytes, packing[spec.dtype]))
        if spec.packed is None
        and can_pack(spec.dtype, spec.bytes)
        and spec.name not in plain
        and not is_added(spec.name)
        else spec
        for spec in skeleton.tensors
    )
    return replace(outline, skeleton=replace(skeleton, tensors=tensors))


def _packed(size: int, share: float) -> PackedSpec:
    """Return what a tensor of ``size`` bytes rests in, packed to ``share`` of them."""
    from offstage.stages.checkpoints.packed import BLOCK_BYTES

    working = READING_THREADS * math.ceil(min(size, BLOCK_BYTES) * share) + READERS * _SCRATCH_BYTES
    return PackedSpec(NAME, math.ceil(size * share), working)


def _opened(config: Config) -> Checkpoint | None:
    """Return the checkpoint; null where no file tells what is in it, as with a config alone."""
    model = config.get("model") or {}
    if not model.get("path"):
        return None
    try:
        return open_checkpoint(ModelSource.of(model).folder, allow_links=bool(model.get("allow_links")))
    except CheckpointError:  # whoever loads it says what is wrong; planning needs no weights
        return None


def _shares(checkpoint: Checkpoint, dtypes: Iterable[str]) -> list[float]:
    return [_share(checkpoint, dtype) for dtype in dtypes]


def _share(checkpoint: Checkpoint, dtype: str) -> float:
    """Return the share that floats of ``dtype`` are packed to; nominal where the checkpoint has none."""
    from offstage.stages.checkpoints.codecs.planes import can_pack

    entries = (extent for _, extent in sorted(checkpoint.entries.items()) if extent.dtype == dtype)
    own = [extent for extent in entries if can_pack(dtype, extent.bytes)]
    if not own:
        return NOMINAL[dtype]
    chosen = [own[number * len(own) // _STRETCHES] for number in range(_STRETCHES)]
    return round(sum(map(_packed_share, chosen)) / len(chosen), 3)


def _packed_share(extent: Extent) -> float:
    """Return the share that a stretch in the middle of ``extent`` is packed to."""
    import numpy as np

    from offstage.stages.checkpoints.codecs.planes import new_compressor, pack_tile

    elements, size = math.prod(extent.shape), int(DTYPE_BYTES[extent.dtype])
    count = min(elements, _ELEMENTS)
    data = np.empty(count * size, np.uint8)
    with opened_shard(extent.file) as descriptor:
        begin = extent.begin + (elements - count) // 2 * size
        read_into(descriptor, data.data, offset=begin, path=extent.file.path)
    return sum(map(len, pack_tile(data, extent.dtype, new_compressor()))) / data.size
