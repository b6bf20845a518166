"""Packed copies in the offload store: what the checkpoint holds plain, in fewer bytes, for who waits for its storage.

A copy is one of the store's files, ``NAME.zstd.dat``, and its entry in the index has the table of its tiles. Of a
tensor that doesn't shrink the index says so, and no copy is made. Copies are losslessly what they are of, and stand
beside plain tensors of the store.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from offstage.stages.checkpoints.codecs.planes import NAME, PlaneCodec, codec_of
from offstage.stages.checkpoints.packed import PackedTensor
from offstage.stages.shard_load.offload_store import OffloadStore, StoredTensor, read_index


def find_packed(
    store: OffloadStore, wanted: Mapping[str, StoredTensor], *, full: bool = False
) -> dict[str, PackedTensor | None]:
    """Return the copies of those of ``wanted`` that are in the ``store``, whole; null for those that don't shrink."""
    index = read_index(store.folder)
    entries = {name: index.get(_key(name), {}) for name in wanted}
    codecs = {name: codec for name, tensor in wanted.items() if (codec := _codec(tensor, entries[name]))}
    files = {name: store.file_of(_key(name), wanted[name].origin, entries[name]) for name in codecs}
    sound = {name: file for name, file in files.items() if file and file.size == codecs[name].rest_bytes}
    copies = {
        name: codecs[name].located(file, 0, wanted[name].shape)
        for name, file in store.find_whole(sound, full=full).items()
    }
    plain = (name for name, tensor in wanted.items() if entries[name] == _plain(tensor))
    return {**dict.fromkeys(plain), **copies}


def put_packed(store: OffloadStore, name: str, tensor: StoredTensor, tiles: Iterable[list[bytes]], *, run: int) -> None:
    """Put the copy of ``tensor`` into the ``store``: the frames of its tiles, as they come."""
    lengths: list[list[int]] = []

    def frames() -> Iterator[bytes]:
        for tile in tiles:
            lengths.append(list(map(len, tile)))
            yield from tile

    told = {**tensor.origin, "codec": NAME, "unpacked": tensor.bytes, "run": run}
    told["tiles"] = lengths  # which is full once all is written
    store.put_pieces(_key(name), told, frames())


def note_plain(store: OffloadStore, name: str, tensor: StoredTensor) -> None:
    """Have the ``store`` remember that ``tensor`` doesn't shrink."""
    store.note(_key(name), _plain(tensor))


def _key(name: str) -> str:
    return f"{name}.{NAME}"


def _plain(tensor: StoredTensor) -> dict[str, Any]:
    return {**tensor.origin, "codec": "none"}


def _codec(tensor: StoredTensor, entry: Mapping[str, Any]) -> PlaneCodec | None:
    known = entry.get("codec") == NAME
    return codec_of(tensor.dtype, math.prod(tensor.shape), entry.get("run"), entry.get("tiles")) if known else None
