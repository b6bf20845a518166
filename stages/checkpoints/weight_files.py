"""Which files of a folder hold a checkpoint's weights: their names, and the index that lists them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from offstage.pipeline.errors import CheckpointError
from offstage.pipeline.regular_files import read_json
from offstage.stages.checkpoints.safetensors_header import check_name, unique_pairs
from offstage.stages.checkpoints.shard_files import is_plain_name

Format = Literal["safetensors", "bin", "gguf"]


@dataclass(frozen=True, slots=True)
class WeightNames:
    """How the files of one format are called: all weights in one, or the index of several."""

    format: Format
    single: str
    index: str


LAYOUTS = (
    WeightNames("safetensors", "model.safetensors", "model.safetensors.index.json"),
    WeightNames("bin", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    WeightNames("safetensors", "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"),
    WeightNames("bin", "diffusion_pytorch_model.bin", "diffusion_pytorch_model.bin.index.json"),
)
"""In the order in which they count: as transformers names them, then as diffusers does."""

SUFFIXES: Mapping[str, Format] = {
    ".safetensors": "safetensors",
    ".bin": "bin",
    ".pt": "bin",
    ".pth": "bin",
    ".gguf": "gguf",
}


def find_weights(folder: Path) -> tuple[str, Format | None]:
    """Return the file that says what ``folder`` holds: one of a known name, else its one index or file of weights.

    The format is null where only the names of the shards tell it. A ``CheckpointError`` where there is no such file.
    """
    layouts = [(name, layout.format) for layout in LAYOUTS for name in (layout.single, layout.index)]
    for name, kind in layouts:
        if folder.joinpath(name).exists() or folder.joinpath(name).is_symlink():
            return name, kind
    for pattern in ("*.index.json", "*.safetensors", "*.gguf"):
        matching = [path.name for path in folder.glob(pattern)]
        if len(matching) == 1:
            return matching[0], None
    names = ", ".join(name for name, _ in layouts)
    raise CheckpointError(f"{folder}: no weights here (looked for {names}); give the folder or file that holds them")


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file that ``path`` is, or that holds the weights of the folder ``path``; null for all else."""
    if path.is_dir():
        with suppress(CheckpointError):
            path /= find_weights(path)[0]
    return path if SUFFIXES.get(path.suffix) == "gguf" and path.is_file() else None


def read_weight_map(path: Path) -> Mapping[str, str]:
    """Return tensor name → shard of the index ``path``, written with a ``weight_map`` or flat."""
    try:
        data = read_json(path, pairs=unique_pairs)
    except ValueError as error:
        reason = f"{error} (a tensor in two shards?)" if "duplicate" in str(error) else f"not valid JSON: {error}"
        raise CheckpointError(f"{path}: {reason}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from error
    weight_map = data.get("weight_map", data) if isinstance(data, dict) else data
    return _checked_map(path, weight_map)


def _checked_map(path: Path, weight_map: Any) -> Mapping[str, str]:
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: not a mapping of tensor names to shards")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"{path}: tensor {name!r}: the name of a shard belongs here, not {str(shard)[:40]!r}")
        check_name(path, name)
    return weight_map


def shard_names(index: Path) -> list[str]:
    """Return the files that an index names; none without an index, or with one that the loader will refuse."""
    try:
        return sorted(set(read_weight_map(index).values()))
    except CheckpointError:
        return []


def weight_files(path: Path) -> list[Path]:
    """Return those files of the weights at ``path`` (a folder, an index or a file) that are there, to look into.

    There may be none: a folder without weights is no error here. Opening a checkpoint checks each file.
    """
    if path.is_dir():
        try:
            path /= find_weights(path)[0]
        except CheckpointError:
            return []
    names = shard_names(path) if path.suffix == ".json" else [path.name]
    return [path.parent / name for name in names if is_plain_name(name) and path.parent.joinpath(name).is_file()]
