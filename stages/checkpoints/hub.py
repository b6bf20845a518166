"""The Hugging Face Hub's cache on this machine, and what is fetched into it: a repository's files at a revision."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from glob import escape
from pathlib import Path

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.shard_files import SMALL_FILES
from offstage.stages.checkpoints.weight_files import LAYOUTS, WeightNames, shard_names

_CONFIG = "config.json"


def is_offline() -> bool:
    """Return whether the network is switched off (``HF_HUB_OFFLINE``)."""
    from huggingface_hub.constants import is_offline_mode

    return is_offline_mode()


@cache
def fetch_small_files(key: str, repo: str, revision: str) -> Path:
    """Return the snapshot's folder with all but the weights; ``key`` is the config key that names ``repo``."""
    return find_snapshot(repo, revision) or _fetch(key, repo, revision, SMALL_FILES)


@cache
def fetch_weights(repo: str, folder: Path) -> Path:
    """Fetch the weights into the snapshot ``folder``, from the very commit that the config was taken from."""
    commit = folder.name
    for layout in LAYOUTS:
        if is_complete(folder):
            break
        _fetch("model.path", repo, commit, [escape(name) for name in _names(folder, layout)])
    return folder


def find_snapshot(repo: str, revision: str) -> Path | None:
    """Return the snapshot's folder if the Hub's cache has it with a config; a download cut short may lack one."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = snapshot_download(
            repo, revision=revision, allow_patterns=list(SMALL_FILES), ignore_patterns=["*/*"], local_files_only=True
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
    return words_of_refusal(repo, revision, first)


def words_of_refusal(repo: str, revision: str, reason: str) -> str:
    """Return what to tell of a ``repo`` that can't be had at ``revision`` for this ``reason``."""
    return (
        f"{repo!r} is no folder here, and can't be had from the Hub at revision {revision!r}: {reason}; "
        "give the folder of a checkpoint, or download it where there is a network and set HF_HOME to that cache"
    )


def is_complete(folder: Path) -> bool:
    """Return whether the weights of one format are all there."""
    return any(
        (folder / layout.single).is_file() or all((folder / name).is_file() for name in _names(folder, layout))
        for layout in LAYOUTS
    )


def _names(folder: Path, layout: WeightNames) -> list[str]:
    """Return the files of that format: those that its index names if it is in ``folder``, else the single one."""
    return shard_names(folder / layout.index) or [layout.single]
