"""The keys ``tracker``: which tracker, where its store is, and what is wrong with them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from offstage.pipeline.errors import Fault, closest
from offstage.pipeline.typed_config import absolute, read, type_faults

TRACKERS = ("mlflow", "trackio")
_LONGEST_EXPERIMENT = 250


@dataclass(frozen=True, slots=True)
class TrackerConfig:
    """``kind`` of tracker, null for none; runs go to its ``experiment``, each with ``notes``.

    Its store lies in ``folder``, unless a server at ``uri`` has one.
    """

    kind: str | None = None
    folder: str | None = None
    uri: str | None = None
    experiment: str = "offstage"
    notes: str | None = None

    @property
    def store(self) -> str:
        """Where the runs are kept: the server's address, or the folder."""
        return self.uri or str(self.folder)


def read_tracker(config: Mapping[str, Any]) -> TrackerConfig:
    """Return the keys ``tracker`` of ``config``, whose types were checked, the address without a slash at its end."""
    given = read(TrackerConfig, config.get("tracker") or {})
    return replace(given, uri=given.uri.rstrip("/")) if given.uri else given


def located(folder: str) -> str:
    """Return ``folder`` as an absolute path; an address, which is no folder, as it is."""
    return folder if "://" in folder else absolute(folder)


def usable_tracker(config: Mapping[str, Any]) -> TrackerConfig | None:
    """Return the tracker of ``config``; null where it names none, and where the config's checks find fault with it."""
    node = config.get("tracker")
    if not isinstance(node, Mapping) or list(type_faults(TrackerConfig, node)):
        return None
    given = read_tracker(config)
    return None if given.kind is None or list(check_tracker(config)) else given


def check_tracker(config: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield what is wrong with the values of the keys ``tracker``, which are of their types."""
    given = read_tracker(config)
    if given.kind is None:
        return
    if given.kind not in TRACKERS:
        yield Fault("tracker.kind", f"{given.kind!r} is no tracker{closest(given.kind, TRACKERS)}; give tracker=none")
        return
    if find_spec(given.kind) is None:
        yield Fault(
            "tracker", f"{given.kind} isn't installed; pip install 'offstage-pipeline[{given.kind}]', or tracker=none"
        )
    if not given.experiment.strip() or len(given.experiment) > _LONGEST_EXPERIMENT:
        rule = f"a name has 1 to {_LONGEST_EXPERIMENT} characters"
        yield Fault("tracker.experiment", f"{given.experiment!r} is no name of an experiment; {rule}")
    yield from _check_folder(given) if given.uri is None else _check_address(given)


def _check_folder(given: TrackerConfig) -> Iterator[Fault]:
    if not given.folder:
        yield Fault("tracker.folder", f"{given.folder!r} is no folder for a store; give one")
        return
    if "://" in given.folder:
        advice = f"tracker.uri={given.folder}" if given.kind == "mlflow" else "a folder: trackio's runs are kept in one"
        yield Fault("tracker.folder", f"{given.folder!r} is an address and no folder; give {advice}")
        return
    path = Path(given.folder)
    lowest = next(folder for folder in (path, *path.parents) if folder.exists())
    if not lowest.is_dir():
        yield Fault("tracker.folder", f"{given.folder!r} can't be a folder: {str(lowest)!r} is a file; give another")
    elif not os.access(lowest, os.W_OK | os.X_OK):
        yield Fault("tracker.folder", f"{given.folder!r} may not be written by this user; give another")


def _check_address(given: TrackerConfig) -> Iterator[Fault]:
    if given.kind != "mlflow":
        yield Fault("tracker.uri", f"{given.kind} has no server; give tracker.folder, or choose tracker=mlflow")
        return
    parts = _split(str(given.uri))
    if parts is not None and parts.username is not None:
        yield Fault(
            "tracker.uri",
            f"the address of {parts.hostname} holds a user's name, and every record would; "
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        )
    elif parts is None or parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        yield Fault("tracker.uri", f"{given.uri!r} is no address of an MLflow server; give http://HOST:PORT")


def _split(uri: str) -> SplitResult | None:
    """Return the parts of ``uri``, null where it isn't even one."""
    try:
        parts = urlsplit(uri)
        _ = parts.port
    except ValueError:
        return None
    return parts
