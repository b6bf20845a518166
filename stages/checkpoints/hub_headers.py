"""The headers of a checkpoint on the Hub, by ranges of its files: what a plan needs of weights that nobody downloaded.

Of each shard eight bytes and the header are asked for, and no more is read whatever a server sends. They are kept in
the user's cache by the commit, so that the network is asked once. Nothing that a server says is trusted: a header is
checked as one of a local file is.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from offstage.pipeline.atomic_files import write_text
from offstage.pipeline.cache import user_cache
from offstage.pipeline.cache.store import Store
from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.checkpoint import Checkpoint, check_index, join_headers
from offstage.stages.checkpoints.extents import MAX_ELEMENTS
from offstage.stages.checkpoints.hub import words_of_failure
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.safetensors_header import header_bytes, parse_header
from offstage.stages.checkpoints.shard_files import ShardFile, is_plain_name
from offstage.stages.checkpoints.weight_files import LAYOUTS, read_weight_map

FOLDER, FILE_NAME = "hub_headers", "headers.json"
_VERSION = 1
MAX_SHARDS = 10_000
"""The files of a checkpoint; the largest published ones are in some hundreds."""
_AT_ONCE = 8
_SECONDS = 60
"""For one range, whatever a server does in between."""
_TIMEOUT = 20
_CHUNK = 2**16
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})", re.ASCII)


def remote_checkpoint(source: ModelSource) -> Checkpoint:
    """Return the checkpoint of a Hub id with all its headers, and none of its data on this machine.

    It is to be planned by, and never read. A ``CheckpointError`` where the Hub can't be reached, gives no ranges, or
    says what can't be; and where the weights aren't safetensors.
    """
    folder = source.folder
    index, weight_map = _index(folder)
    repo, commit = source.path, folder.name
    key = hashlib.sha256(json.dumps([_VERSION, repo, commit]).encode()).hexdigest()[:32]
    store = Store(user_cache(), model=repo)
    names = None if weight_map is None else sorted(set(weight_map.values()))
    artifact, _, _ = store.obtain(FOLDER, key, partial(fetch_headers, repo, commit, names))
    store.sweep()
    fetched = artifact.json(FILE_NAME).items()
    headers = (parse_header(_file(repo, name, one["size"]), one["header"].encode()) for name, one in fetched)
    files, entries = join_headers(headers)
    checkpoint = Checkpoint(folder, "safetensors", files, entries, weight_map, index)
    if weight_map is not None:
        check_index(checkpoint, entries)
    return checkpoint


def _index(folder: Path) -> tuple[str | None, Mapping[str, str] | None]:
    """Return the name of the index of safetensors in ``folder``, and what it says; nulls where there is none."""
    for layout in LAYOUTS:
        if layout.format != "safetensors" or not (folder / layout.index).is_file():
            continue
        weight_map = read_weight_map(folder / layout.index)
        wrong = next((name for name in weight_map.values() if not is_plain_name(name)), None)
        if wrong is not None:
            raise CheckpointError(f"{folder / layout.index}: {wrong!r} is not a plain file name")
        if len(set(weight_map.values())) > MAX_SHARDS:
            raise CheckpointError(f"{folder / layout.index}: names more than {MAX_SHARDS} files")
        return layout.index, weight_map
    return None, None


def _file(repo: str, name: str, size: int) -> ShardFile:
    return ShardFile(name, Path(repo, name), size, None, "")


def fetch_headers(repo: str, commit: str, names: list[str] | None, folder: Path) -> None:
    """Write the headers of the files ``names`` to ``folder``; null: of the one file that has all weights.

    A ``CheckpointError`` names the file that can't be had by ranges, or whose header is wrong.
    """
    if names is None:
        headers = _only(repo, commit)
    else:
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            headers = dict(zip(names, threads.map(partial(_fetch, repo, commit), names), strict=True))
    content = {name: {"size": size, "header": raw.decode()} for name, (size, raw) in headers.items()}
    write_text(folder / FILE_NAME, json.dumps(content))


def _only(repo: str, commit: str) -> dict[str, tuple[int, bytes]]:
    """Return the size and the header of the one file that has all weights, under the first name that there is."""
    from huggingface_hub.errors import RemoteEntryNotFoundError

    singles = [layout.single for layout in LAYOUTS if layout.format == "safetensors"]
    for name in singles[:-1]:
        try:
            return {name: _fetch(repo, commit, name)}
        except CheckpointError as error:
            if not isinstance(error.__cause__, RemoteEntryNotFoundError):
                raise
    return {singles[-1]: _fetch(repo, commit, singles[-1])}


def _fetch(repo: str, commit: str, name: str) -> tuple[int, bytes]:
    """Return the size of the file ``name``, and its header, checked."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    sizes: list[int] = []

    def read(offset: int, length: int) -> bytes:
        data, size = _read_range(repo, commit, name, offset, length)
        sizes.append(size)
        return data

    try:
        prefix = read(0, 8)
        path, size = Path(repo, name), sizes[0]
        raw = bytes(header_bytes(lambda begin, length: read(begin, length) if begin else prefix, path, size))
    except (HTTPError, OSError, ValueError) as error:
        raise CheckpointError(f"model.path: {words_of_failure(repo, commit, error)}") from error
    if sizes[-1] != size:
        raise _refused(repo, name, f"is said to be of {size} bytes, and of {sizes[-1]} then")
    parse_header(_file(repo, name, size), raw)
    return size, raw


def _read_range(repo: str, commit: str, name: str, offset: int, length: int) -> tuple[bytes, int]:
    """Return the bytes at ``offset`` of the file, and its size, as the Hub tells them."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        hf_raise_for_status,
        http_stream_backoff,
    )

    wanted = f"bytes={offset}-{offset + length - 1}"
    headers = {**build_hf_headers(), "Range": wanted, "Accept-Encoding": "identity"}
    url, ends = hf_hub_url(repo, name, revision=commit), time.monotonic() + _SECONDS
    with http_stream_backoff("GET", url, headers=headers, timeout=_TIMEOUT, max_retries=1) as response:
        hf_raise_for_status(response)
        content_range = _RANGE.fullmatch(str(response.headers.get("Content-Range", "")))
        if response.status_code != 206 or content_range is None:
            raise _refused(repo, name, f"can't be had by ranges (status {response.status_code}); download it first")
        begin, last, size = map(int, content_range.groups())
        if (begin, last) != (offset, offset + length - 1) or not last < size <= MAX_ELEMENTS:
            raise _refused(repo, name, f"was asked for {wanted}, and came as {content_range[0]}")
        data = bytearray()
        for chunk in _chunks(response, ends):
            data += chunk
            if len(data) > length:
                break
    if len(data) != length:
        raise _refused(repo, name, f"was asked for {wanted}, and came in {'more' if len(data) > length else 'fewer'}")
    return bytes(data), size


def _chunks(response: Any, ends: float) -> Iterator[bytes]:
    for chunk in response.iter_raw(_CHUNK):
        if time.monotonic() > ends:
            raise TimeoutError(f"a range takes more than {_SECONDS} s")
        yield chunk


def _refused(repo: str, name: str, what: str) -> CheckpointError:
    return CheckpointError(f"model.path: {name!r} of {repo!r} {what}")
