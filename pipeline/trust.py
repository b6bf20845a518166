"""What a record names that its author has no say in here, unless the user gives the word: code, and places.

A run that is replayed is judged by its config. Nothing is carried out here, and nothing that is named is imported. The
user's own records (``offstage.pipeline.signatures``) may name any place: who wrote them chose these. Code is always
asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from offstage.pipeline.config import named_paths
from offstage.pipeline.installed_stages import installed_stages, is_own_stage
from offstage.pipeline.plain_data import walk
from offstage.pipeline.regular_files import lies_in
from offstage.pipeline.stage import Config
from offstage.pipeline.typed_config import VARIABLES

REMOTE_CODE = "remote-code"
"""The word that trusts the Python files of a checkpoint folder."""


@dataclass(frozen=True, slots=True)
class TrustRequest:
    """Something that a record names under ``key``, and the ``word`` that trusts it.

    What is no code is a choice of the record's author: a path outside its folder, a checkpoint of the Hub.
    """

    word: str
    key: str
    is_code: bool = True


def outputs_for(record: Path) -> Path:
    """Return where a replay of ``record`` writes: the ``outputs`` folder that it lies in, else that of the current one.

    It lies in one wherever that was moved to, and however its run or its sweep was named below ``runs`` or
    ``multirun``. What the record says is not asked: its author may have named any folder of this machine.
    """
    folder = record.absolute().parent
    trees = (above.parent for above in folder.parents if above.name in ("runs", "multirun"))
    return next((tree for tree in trees if os.access(tree, os.W_OK)), Path("outputs").absolute())


def named_by_config(config: Config, folders: Sequence[Path]) -> Iterator[TrustRequest]:
    """Yield what ``config`` names as code, its places outside ``folders``, and what it would have fetched."""
    yield from _named_code(config)
    own_folders = [Path(str(resources.files("offstage.conf"))), *folders]
    for key, path in named_paths(config):
        is_path = Path(path).is_absolute()
        if (is_path and not lies_in(path, own_folders)) or (not is_path and key.startswith("model.")):
            yield TrustRequest(path, key, is_code=False)


def _named_code(config: Config) -> Iterator[TrustRequest]:
    chosen = config.get("stages")
    for stage in chosen if isinstance(chosen, list | tuple) else ():
        if stage in installed_stages() and not is_own_stage(stage):
            yield TrustRequest(stage, "stages")
    node = config.get("model")
    model = node if isinstance(node, Mapping) else {}
    if model.get("kind") == "module" and "_target_" not in model:
        yield TrustRequest("None", "model._target_")
    if "." in str(model.get("class") or ""):
        yield TrustRequest(str(model["class"]), "model.class")
    own = {key: value for key, value in config.items() if key != VARIABLES}  # those are data, that nothing calls
    for place, node in walk(own):  # Hydra calls those too that stand among the arguments of another
        if isinstance(node, Mapping) and "_target_" in node:
            yield TrustRequest(str(node["_target_"]), f"{place}._target_")
        if isinstance(node, Mapping) and node.get("trust_remote_code"):
            yield TrustRequest(REMOTE_CODE, f"{place}.trust_remote_code")
