"""What a record names that its author has no say in here, unless the user gives the word: code, places, settings.

A sweep that is resumed, a run that is replayed and one that is reported are judged alike, by their composed configs and
not by how an argument looks. Nothing is carried out here, and nothing that is named is imported. The user's own records
(``offstage.pipeline.signatures``) may name any place and setting: who wrote them chose these. Code is always asked for.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

from offstage.pipeline.config import named_paths
from offstage.pipeline.errors import ConfigError, OffstageError
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

    What is no code is a choice of the record's author: a path outside its folder, an address, a setting of Hydra.
    """

    word: str
    key: str
    is_code: bool = True


@dataclass(frozen=True, slots=True)
class Trust:
    """What the user lets a record in ``folder`` do: what the ``words`` name; if it is their ``own``, all but code.

    ``files`` are the digests of the config files that their own command was composed of, by name.
    """

    folder: Path
    words: Sequence[str]
    own: bool
    files: Mapping[str, str] = field(default_factory=dict)

    def made_of(self, files: Mapping[str, str]) -> Trust:
        """Return the trust in what is composed of ``files``: it is a stranger's, where one isn't as the user had it."""
        return replace(self, own=self.own and all(self.files.get(name) == digest for name, digest in files.items()))

    def refuse(self, asked: Iterable[TrustRequest], *, about: Path, error: type[OffstageError] = ConfigError) -> None:
        """Raise an ``error`` that tells what is ``asked`` for without the user's word, and how to give it."""
        untrusted = {
            each.word: each.key for each in asked if each.word not in self.words and (each.is_code or not self.own)
        }
        if untrusted:
            named = ", ".join(f"{key} ({word!r})" for word, key in untrusted.items())
            flags = trust_flags([*self.words, *untrusted])
            raise error(
                f"{about}: it names code to run, places outside its folder or settings that only its author chose: "
                f"{named}; where you trust them, give {flags}"
            )

    def encloses(self, path: str | Path, *others: Path) -> bool:
        """Return whether ``path`` lies in the record's folder or in one of ``others``."""
        return lies_in(path, [self.folder, *others])


def trust_flags(words: Iterable[str]) -> str:
    """Return the options of a command that give all of ``words``."""
    return " ".join(shlex.quote(f"--trust={word}") for word in dict.fromkeys(words))


def ways_out_of(folder: Path) -> Iterator[TrustRequest]:
    """Yield what below ``folder`` leads out of it: links, by which others would be written, pipes and devices."""
    found = (Path(above, name) for above, folders, files in os.walk(folder) for name in (*folders, *files))
    for path in found:
        if path.is_symlink() and not lies_in(path, [folder]):
            yield TrustRequest(str(path.relative_to(folder)), "a link")
        elif not path.is_symlink() and not path.is_dir() and not path.is_file():
            yield TrustRequest(str(path.relative_to(folder)), "no regular file")


def outputs_for(record: Path) -> Path:
    """Return where a replay of ``record`` writes: the ``outputs`` folder that it lies in, else that of the current one.

    It lies in one wherever that was moved to, and however its run or its sweep was named below ``runs`` or
    ``multirun``. What the record says is not asked: its author may have named any folder of this machine.
    """
    folder = record.absolute().parent
    trees = (above.parent for above in folder.parents if above.name in ("runs", "multirun"))
    return next((tree for tree in trees if os.access(tree, os.W_OK)), Path("outputs").absolute())


def named_by_config(config: Config, trust: Trust, outputs: Path) -> Iterator[TrustRequest]:
    """Yield what ``config`` names as code, and its places outside the record's folder and ``outputs``."""
    yield from named_code(config)
    yield from _named_places(config, lambda path: trust.encloses(path, outputs))


def named_code(config: Config) -> Iterator[TrustRequest]:
    """Yield what ``config`` names as code."""
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
    for place, node in walk(_carried_out(config)):  # Hydra calls those too that stand among the arguments of another
        if isinstance(node, Mapping) and "_target_" in node:
            yield TrustRequest(str(node["_target_"]), f"{place}._target_")
        if isinstance(node, Mapping) and node.get("trust_remote_code"):
            yield TrustRequest(REMOTE_CODE, f"{place}.trust_remote_code")


def _carried_out(config: Config) -> Config:
    """Return ``config`` without the user's variables, which are data: what is made of them stands where they are used.

    Where something isn't resolved yet, and so may come to what they hold, they are judged too.
    """
    own = {key: value for key, value in config.items() if key != VARIABLES}
    resolved = not any(isinstance(value, str) and "${" in value for _, value in walk(own))
    return own if resolved else config


def _named_places(config: Config, encloses: Callable[[str], bool]) -> Iterator[TrustRequest]:
    """Yield the paths of ``config`` that nothing ``encloses``, and what it would have fetched or sent."""
    own = [Path(str(resources.files("offstage.conf")))]
    for key, path in named_paths(config):
        is_path = Path(path).is_absolute()
        if (is_path and not encloses(path) and not lies_in(path, own)) or (not is_path and key.startswith("model.")):
            yield TrustRequest(path, key, is_code=False)
    tracker = config.get("tracker")
    if isinstance(tracker, Mapping) and tracker.get("kind") is not None:
        yield TrustRequest(str(tracker.get("uri") or tracker.get("folder")), "tracker", is_code=False)
