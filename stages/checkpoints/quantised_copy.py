"""A plain checkpoint as it rests once some of its weights are quantised: the key ``model.quantize``.

The checkpoint stays as it is. What is quantised lies in files of the offload store, laid out by rule from headers
alone: a plan of it needs no file of these, and a run makes those that aren't there. All else is read where the
checkpoint has it; a pickle, which tells no places, has its other tensors in these files too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from offstage.stages.checkpoints.checkpoint import Checkpoint
from offstage.stages.checkpoints.codecs.quantisers import QUANTISERS
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import AtRest
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine.aligned_memory import TENSOR_ALIGNMENT, align_up

PIECE_BYTES = 256 * 2**20
"""What a file has of weights, unless one is larger: what a run that was killed does again, at most."""


@dataclass(frozen=True, slots=True)
class CopyFile:
    """One file of the copy: its ``tensors``, by the checkpoint's names, each with where its parts lie in it."""

    file: ShardFile
    tensors: Mapping[str, tuple[Extent, ...]]


@dataclass(frozen=True, slots=True)
class QuantisedCopy:
    """The weights of a checkpoint that are quantised to ``format``, and all others.

    ``sources`` are the tensors as the checkpoint has them, ``quantised`` the names of those that are quantised.
    ``entries`` are all as a model uses them, ``stored`` as they lie in files: scales under names of their own.
    """

    format: str
    sources: Mapping[str, Extent]
    quantised: frozenset[str]
    files: tuple[CopyFile, ...]
    entries: Mapping[str, AtRest]
    stored: Mapping[str, Extent]

    def located(self, files: Mapping[str, ShardFile]) -> QuantisedCopy:
        """Return the same with those of ``files``, by name, that are there."""
        moved = tuple(_moved(one, files.get(one.file.name, one.file)) for one in self.files)
        return _copy(self.format, self.sources, self.quantised, moved)


def with_copy(
    checkpoint: Checkpoint, sources: Mapping[str, Extent], quantised: Collection[str], kind: str
) -> Checkpoint:
    """Return ``checkpoint``, whose tensors are ``sources``, with those ``quantised`` as they rest in the format
    ``kind``: in files that need not be there.
    """
    chosen = frozenset(quantised)
    copied = sources if checkpoint.format == "bin" else {name: sources[name] for name in sources if name in chosen}
    files = tuple(_laid_out(checkpoint.folder, copied, chosen, kind))
    return replace(checkpoint, copy=_copy(kind, sources, chosen, files))


def _copy(
    kind: str, sources: Mapping[str, Extent], quantised: frozenset[str], files: tuple[CopyFile, ...]
) -> QuantisedCopy:
    entries: dict[str, AtRest] = {}
    stored: dict[str, Extent] = {}
    copied = {name: parts for file in files for name, parts in file.tensors.items()}
    for name, source in sources.items():
        if name not in quantised:
            entries[name] = stored[name] = copied[name][0] if name in copied else source
            continue
        parts = dict(zip(QUANTISERS[kind].parts(name, source.header), copied[name], strict=True))
        stored |= parts
        entries[name] = QUANTISERS[kind].packed(name, source.header, parts)
    return QuantisedCopy(kind, sources, quantised, files, entries, stored)


def _laid_out(folder: Path, copied: Mapping[str, Extent], quantised: Collection[str], kind: str) -> Iterator[CopyFile]:
    """Yield the files of the tensors ``copied``, in the order in which these lie: none has those of two shards."""
    shard, number, tensors, end = "", 0, dict[str, tuple[Extent, ...]](), 0
    for name, source in sorted(copied.items(), key=lambda item: (item[1].file.name, item[1].begin)):
        headers = QUANTISERS[kind].parts(name, source.header) if name in quantised else {name: source.header}
        if tensors and (source.file.name != shard or end >= PIECE_BYTES):
            yield _file(folder, f"{shard}.{kind}-{number}", tensors, end)
            number, tensors, end = (number + 1 if source.file.name == shard else 0), {}, 0
        shard, parts = source.file.name, list[Extent]()
        for header in headers.values():
            parts.append(Extent(source.file, align_up(end, TENSOR_ALIGNMENT), header.dtype, header.shape))
            end = parts[-1].end
        tensors[name] = tuple(parts)
    if tensors:
        yield _file(folder, f"{shard}.{kind}-{number}", tensors, end)


def _file(folder: Path, name: str, tensors: Mapping[str, tuple[Extent, ...]], size: int) -> CopyFile:
    file = ShardFile(name, folder / name, size, None, "")
    return _moved(CopyFile(file, tensors), file)


def _moved(one: CopyFile, file: ShardFile) -> CopyFile:
    placed = {name: tuple(replace(part, file=file) for part in parts) for name, parts in one.tensors.items()}
    return CopyFile(file, placed)
