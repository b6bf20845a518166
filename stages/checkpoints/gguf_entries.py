"""The tensors of a GGUF file as a reader brings them: by the model's names, each an extent or packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from offstage.pipeline.regular_files import read_json
from offstage.stages.checkpoints.codecs.ggml_formats import FORMATS, PLAIN
from offstage.stages.checkpoints.codecs.gguf import AS_THEY_ARE, Arrangement, GgufCodec
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from offstage.stages.checkpoints.gguf_model import NAMES, gguf_folder
from offstage.stages.checkpoints.gguf_names import NamedTensor
from offstage.stages.checkpoints.packed import AtRest, PackedTensor


def gguf_entries(path: Path) -> Mapping[str, AtRest]:
    """Return the tensors of the model that the GGUF file ``path`` holds, by their names in the model."""
    header, folder = read_gguf_header(path), gguf_folder(path)
    kept = read_json(folder / NAMES)
    return {name: _entry(header, _named(fields)) for name, fields in kept.items()}


def _named(fields: Mapping[str, Any]) -> NamedTensor:
    swapped = fields["arrangement"]["swapped"]
    arrangement = Arrangement(**{**fields["arrangement"], "swapped": None if swapped is None else tuple(swapped)})
    return NamedTensor(tuple(fields["shape"]), tuple(fields["sources"]), arrangement)


def _entry(header: GgufHeader, named: NamedTensor) -> AtRest:
    """Return what the tensor ``named`` rests in; plain values in the model's own order are it, in their own dtype."""
    sources = [header.tensors[name] for name in named.sources]
    kinds = tuple(source.kind for source in sources)
    parts = tuple(_part(source, named.arrangement) for source in sources)
    if kinds[0] in PLAIN and len(kinds) == 1 and named.arrangement == AS_THEY_ARE:
        parts = (replace(parts[0], dtype=PLAIN[kinds[0]], shape=named.shape),)
    return PackedTensor(GgufCodec(kinds, named.arrangement), parts, "float32", named.shape)


def _part(tensor: GgufTensor, arrangement: Arrangement) -> Extent:
    """Return the extent of ``tensor``: rows of blocks, of a vector whose elements change places one element each."""
    width = FORMATS[tensor.kind].bytes
    by_element = arrangement.swapped is not None and len(tensor.shape) == 1
    return replace(tensor.extent, shape=(tensor.shape[0], width)) if by_element else tensor.extent
