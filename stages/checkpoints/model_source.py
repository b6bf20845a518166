"""Where a model comes from, as the node ``model`` of a config says: its folder, its tokenizer's, and its weights.

``model.path`` is a folder, a file, or the name of a checkpoint on the Hugging Face Hub, which stands for a snapshot in
the Hub's cache on this machine. What is there is used without asking the network; what isn't is fetched, and no more
than is needed: the small files that say what the model is, and the weights not before something asks for them, so that
a plan of a model that nobody has downloaded costs kilobytes.

A resolved config has every folder as an absolute path, so ``org/name`` there is a Hub id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from offstage.pipeline.typed_config import absolute
from offstage.stages.checkpoints import hub
from offstage.stages.checkpoints.checkpoint import Checkpoint, Depth, open_checkpoint
from offstage.stages.checkpoints.gguf_model import gguf_folder
from offstage.stages.checkpoints.weight_files import gguf_file, weight_files

DEFAULT_REVISION = "main"
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")


def is_hub_id(path: object) -> bool:
    """Return whether the ``model.path`` of a resolved config names a checkpoint on the Hub."""
    return isinstance(path, str) and _HUB_ID.fullmatch(path) is not None


def located(path: str) -> str:
    """Return ``path`` as a resolved config has it: absolute, unless it reads ``org/name`` and nothing is there."""
    return path if is_hub_id(path) and not Path(path).exists() else absolute(path)


@dataclass(frozen=True)
class ModelSource:
    """What a resolved config's ``model`` says of where the model lies, by the names of its keys.

    A ``CheckpointError`` of its properties names a Hub id that isn't on this machine and can't be fetched.
    """

    path: str
    revision: str = DEFAULT_REVISION
    tokenizer: str | None = None
    trust_remote_code: bool = False
    allow_links: bool = False

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> Self:
        """Return what the node ``model`` says."""
        return cls(
            path=str(model.get("path") or ""),
            revision=str(model.get("revision") or DEFAULT_REVISION),
            tokenizer=str(model.get("tokenizer") or "") or None,
            trust_remote_code=bool(model.get("trust_remote_code")),
            allow_links=bool(model.get("allow_links")),
        )

    @property
    def is_on_hub(self) -> bool:
        """Whether it is named by a Hub id."""
        return is_hub_id(self.path)

    @cached_property
    def folder(self) -> Path:
        """The folder with config and tokenizer in it; a Hub id's weights may be missing there.

        Of a GGUF file it is the one that says what transformers makes of that file.
        """
        return _folder("model.path", self.path, self.revision)

    @cached_property
    def tokenizer_folder(self) -> Path | None:
        """The folder of ``tokenizer``, another folder or Hub id; null where none is given."""
        return _folder("model.tokenizer", self.tokenizer, DEFAULT_REVISION) if self.tokenizer else None

    @property
    def text_folder(self) -> Path:
        """The folder that the tokenizer is read from: its own, or that of the model."""
        return self.tokenizer_folder or self.folder

    @property
    def weights(self) -> Path:
        """What ``path`` stands for, weights included: a folder or a file of the user's, or a snapshot."""
        return hub.fetch_weights(self.path, self.folder) if self.is_on_hub else Path(self.path)

    @property
    def lacks_weights(self) -> bool:
        """Whether it is a Hub id whose weights aren't all on this machine; fetches none."""
        return self.is_on_hub and not hub.is_complete(self.folder)

    @property
    def local_weights(self) -> list[Path]:
        """Those files of the weights that are on this machine, to look into; fetches none."""
        return weight_files(self.folder if self.is_on_hub else Path(self.path))

    def open(self, *, depth: Depth = "headers") -> Checkpoint:
        """Open the checkpoint, whose weights are fetched where they aren't here: see ``open_checkpoint``."""
        return open_checkpoint(self.weights, allow_links=self.allow_links, depth=depth)

    def is_here(self, *, weights: bool = False) -> bool:
        """Return whether all that is needed of it is on this machine, if it is a Hub id; asks no network."""
        if not self.is_on_hub:
            return True
        snapshot = hub.find_snapshot(self.path, self.revision)
        return snapshot is not None and (not weights or hub.is_complete(snapshot))

    def fault_offline(self, *, weights: bool = False) -> str | None:
        """Return why a Hub id can't be had where the network is switched off (``HF_HUB_OFFLINE``); else null."""
        if not hub.is_offline() or self.is_here(weights=weights):
            return None
        return hub.words_of_refusal(self.path, self.revision, "the network is switched off (HF_HUB_OFFLINE)")


def _folder(key: str, path: str, revision: str) -> Path:
    if is_hub_id(path):
        return hub.fetch_small_files(key, path, revision)
    packed = gguf_file(Path(path))
    return gguf_folder(packed) if packed else Path(path)
