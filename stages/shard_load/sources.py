"""Which weights a run works on, as its record says it: by file, and by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offstage.pipeline.stage import SourceFiles
from offstage.stages.checkpoints.checkpoint import Checkpoint, entries_by_file, looks_at, small_files
from offstage.stages.checkpoints.shard_files import hub_digest, hub_place


def weight_sources(
    checkpoint: Checkpoint, digests: Mapping[str, str], adapter: Mapping[str, str] | None, *, verify: str
) -> SourceFiles:
    """Return what ``checkpoint`` is by the content of its files, and the ``adapter``, whose files have their SHA-256.

    ``digests`` are those of the checkpoint's files that were hashed whole; of others the Hub may have said it, where
    they lie in its cache. ``verify`` says how deep was looked.
    """
    files: list[dict[str, Any]] = []
    tensors: dict[str, dict[str, list[Any]]] = {}
    for (file, held), look in zip(entries_by_file(checkpoint), looks_at(checkpoint), strict=True):
        named = hub_digest(file.path)
        files.append(
            {
                "name": file.name,
                "size": file.size,
                "header": look.header if look else None,
                "sampled": look.sampled if look else None,
                "sha256": digests.get(file.name, named),
                "sha256_from": "bytes" if file.name in digests else "hub" if named else None,
            }
        )
        if look is not None and held:
            entries = zip(held.items(), look.tensors, strict=True)
            tensors[file.name] = {name: [entry.dtype, list(entry.shape), digest] for (name, entry), digest in entries}
    place = hub_place(checkpoint.files[0].path)
    hub = {"id": place[0], "revision": place[1]} if place else None
    weights = {**small_files(checkpoint), "verify": verify, "hub": hub, "files": files}
    return SourceFiles({"weights": weights, **({"adapter": adapter} if adapter is not None else {})}, tensors)
