"""Checkpoints by the name that they have on the Hugging Face Hub.

``model.path=org/name`` stands for a snapshot in the Hub's cache on this machine. What is there is used without asking
the network; what isn't is fetched, and no more than is needed: the small files that say what the model is, and the
weights not before something asks for them, so that a plan of a model that nobody has downloaded costs kilobytes.

A resolved config has every folder as an absolute path, so ``org/name`` there is a Hub id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from glob import escape
from pathlib import Path
from typing import Any

from offstage.pipeline.errors import CheckpointError
from offstage.pipeline.typed_config import absolute
from offstage.stages.checkpoints.gguf_model import gguf_folder
from offstage.stages.checkpoints.shard_files import TEXTS
from offstage.stages.checkpoints.weight_files import LAYOUTS, WeightNames, gguf_file, shard_names, weight_files

DEFAULT_REVISION = "main"
_CONFIG = "config.json"
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")


def is_hub_id(path: object) -> bool:
    """Return whether the ``model.path`` of a resolved config names a checkpoint on the Hub."""
    return isinstance(path, str) and _HUB_ID.fullmatch(path) is not None


def located(path: str) -> str:
    """Return ``path`` as a resolved config has it: absolute, unless it reads ``org/name`` and nothing is there."""
    return path if is_hub_id(path) and not Path(path).exists() else absolute(path)


def checkpoint_folder(model: Mapping[str, Any]) -> Path:
    """Return the folder of ``model.path``, config and tokenizer in it; a Hub id's weights may be missing there.

    Of a GGUF file it is the one that says what transformers makes of that file.

    A ``CheckpointError`` names an id that isn't on this machine and can't be fetched.
    """
    return _folder("model.path", model.get("path"), _revision(model))


def tokenizer_folder(model: Mapping[str, Any]) -> Path | None:
    """Return the folder of ``model.tokenizer``, another folder or Hub id; null where none is given."""
    given = model.get("tokenizer")
    return _folder("model.tokenizer", given, DEFAULT_REVISION) if given else None


def _folder(key: str, path: object, revision: str) -> Path:
    if is_hub_id(path):
        return _texts(key, str(path), revision)
    place = Path(str(path or ""))
    packed = gguf_file(place)
    return gguf_folder(packed) if packed else place


def weights_path(model: Mapping[str, Any]) -> Path:
    """Return what ``model.path`` stands for, weights included: a folder or a file of the user's, or a snapshot."""
    path = model.get("path")
    return _weights(str(path), checkpoint_folder(model)) if is_hub_id(path) else Path(str(path or ""))


def lacks_weights(model: Mapping[str, Any]) -> bool:
    """Return whether ``model.path`` is a Hub id whose weights aren't all on this machine; fetches none."""
    return is_hub_id(model.get("path")) and not _is_complete(checkpoint_folder(model))


def local_weights(model: Mapping[str, Any]) -> list[Path]:
    """Return those files of the weights of ``model.path`` that are on this machine, to look into; fetches none."""
    path = model.get("path")
    return weight_files(checkpoint_folder(model) if is_hub_id(path) else Path(str(path or "")))


def local_snapshot(model: Mapping[str, Any], *, weights: bool = False) -> Path | None:
    """Return the snapshot of a Hub id if all that is needed of it is on this machine; asks no network."""
    folder = _cached(str(model["path"]), _revision(model))
    return folder if folder is not None and (not weights or _is_complete(folder)) else None


def fault_offline(model: Mapping[str, Any], *, weights: bool = False) -> str | None:
    """Return why a Hub id can't be had where the network is switched off (``HF_HUB_OFFLINE``); null where it can."""
    from huggingface_hub.constants import is_offline_mode

    if not is_offline_mode() or local_snapshot(model, weights=weights) is not None:
        return None
    return _refusal(str(model["path"]), _revision(model), "the network is switched off (HF_HUB_OFFLINE)")


def _revision(model: Mapping[str, Any]) -> str:
    return str(model.get("revision") or DEFAULT_REVISION)


@cache
def _texts(key: str, repo: str, revision: str) -> Path:
    return _cached(repo, revision) or _fetch(key, repo, revision, TEXTS)


@cache
def _weights(repo: str, folder: Path) -> Path:
    """Fetch the weights into the snapshot ``folder``, from the very commit that the config was taken from."""
    commit = folder.name
    for layout in LAYOUTS:
        if _is_complete(folder):
            break
        _fetch("model.path", repo, commit, [escape(name) for name in _names(folder, layout)])
    return folder


def _cached(repo: str, revision: str) -> Path | None:
    """Return the snapshot's folder if the Hub's cache has it with a config; a download cut short may lack one."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = snapshot_download(
            repo, revision=revision, allow_patterns=list(TEXTS), ignore_patterns=["*/*"], local_files_only=True
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Path(snapshot) if Path(snapshot, _CONFIG).is_file() else None


def _fetch(key: str, repo: str, revision: str, patterns: Sequence[str]) -> Path:
    """Download the files of the snapshot's top folder that match ``patterns``, with the Hub's own progress bars.

    ``key`` is the config key that names the repository.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    try:
        snapshot = snapshot_download(repo, revision=revision, allow_patterns=list(patterns), ignore_patterns=["*/*"])
    except (HTTPError, OSError, ValueError) as error:
        raise CheckpointError(f"{key}: {words_of_failure(repo, revision, error)}") from error
    return Path(snapshot)


def words_of_failure(repo: str, revision: str, error: Exception) -> str:
    """Return in a line why ``repo`` can't be had at ``revision``: what ``error`` says, which its client raised."""
    first = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0]
    return _refusal(repo, revision, first)


def _refusal(repo: str, revision: str, reason: str) -> str:
    return (
        f"{repo!r} is no folder here, and can't be had from the Hub at revision {revision!r}: {reason}; "
        "give the folder of a checkpoint, or download it where there is a network and set HF_HOME to that cache"
    )


def _is_complete(folder: Path) -> bool:
    """Return whether the weights of one format are all there."""
    return any(
        (folder / layout.single).is_file() or all((folder / name).is_file() for name in _names(folder, layout))
        for layout in LAYOUTS
    )


def _names(folder: Path, layout: WeightNames) -> list[str]:
    """Return the files of that format: those that its index names if it is in ``folder``, else the single one."""
    return shard_names(folder / layout.index) or [layout.single]
