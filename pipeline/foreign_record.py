"""A record that somebody else may have written: data, held to its shape.

What it names is judged by ``offstage.pipeline.trust``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from offstage.pipeline.config import check
from offstage.pipeline.errors import ReplayError, StorageError
from offstage.pipeline.installed_stages import installed_stages, stage_configs
from offstage.pipeline.plain_data import LARGEST, walk
from offstage.pipeline.record import RunRecord
from offstage.pipeline.typed_config import fits, key_names

_SHAPE: Mapping[str, Any] = {
    "status": str,
    "overrides": Sequence[str],
    "config": Mapping[str, Any],
    "environment": Mapping[str, Any],
    "stages": Sequence[Mapping[str, Any]],
    "metrics": Mapping[str, Any],
    "outputs": Sequence[Mapping[str, Any]],
    "device_map": Mapping[str, Any] | None,
    "inputs": Mapping[str, Any] | None,
    "places": Mapping[str, str] | None,
    "packages": Mapping[str, str] | None,
}
_WEIGHTS_SHAPE: Mapping[str, Any] = {"files": Sequence[Mapping[str, Any]]}
_FILE_SHAPE: Mapping[str, Any] = {
    "name": str,
    "size": int,
    "header": str | None,
    "sampled": str | None,
    "sha256": str | None,
}
_STAGE_SHAPE: Mapping[str, Any] = {"name": str, "key": str, "artifact": str, "inputs": Mapping[str, Any] | None}
_OUTPUT_SHAPE: Mapping[str, Any] = {"token_ids": Sequence[int] | None}
_OPTIONAL = ("device_map", "inputs", "places", "packages", "token_ids", "header", "sampled", "sha256")
_SHOWN = 3


def load_foreign(run: Path) -> RunRecord:
    """Return the completed run that ``run`` records, of the shape that a run writes, with a config that can be run.

    Raises ``ReplayError`` where there is nothing to repeat: no record, a damaged one, or one of a run without an end.
    """
    try:
        record = RunRecord.load(run)
    except StorageError as error:
        raise ReplayError(str(error)) from error
    status = record.data.get("status")
    if status != "completed":
        raise ReplayError(
            f"{run}: the run is {status}, so there is no result to compare with; replay one that completed"
        )
    faults = [*_bad_values(record.data), *_bad_shape(record.data)] or _bad_config(record)
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ReplayError(f"{record.path}: damaged: {'; '.join(faults[:_SHOWN])}{more}; restore the file")
    return record


def _bad_values(content: object) -> list[str]:
    """Return what no run writes, wherever it stands: numbers that aren't any."""
    if any(isinstance(value, int | float) and not abs(value) < LARGEST for _, value in walk(content)):
        return ["it holds a number beyond 64 bits, or one that is none"]
    return []


def _bad_shape(content: Mapping[str, Any]) -> list[str]:
    faults = list(_misfits(_SHAPE, content))
    if faults:
        return faults
    return [
        *(fault for stage in content["stages"] for fault in _misfits(_STAGE_SHAPE, stage, above="stages: ")),
        *(fault for output in content["outputs"] for fault in _misfits(_OUTPUT_SHAPE, output, above="outputs: ")),
        *_bad_weights((content.get("inputs") or {}).get("weights")),
    ]


def _bad_weights(weights: object) -> list[str]:
    if weights is None:  # a record of an older release, or of stages without any
        return []
    if not isinstance(weights, Mapping):
        return ["inputs.weights is of another type"]
    above = "inputs.weights.files: "
    faults = list(_misfits(_WEIGHTS_SHAPE, weights, above="inputs.weights."))
    return faults or [fault for file in weights["files"] for fault in _misfits(_FILE_SHAPE, file, above=above)]


def _misfits(shape: Mapping[str, Any], content: Mapping[str, Any], *, above: str = "") -> Iterator[str]:
    for name, hint in shape.items():
        if name not in content and name not in _OPTIONAL:
            yield f"{above}{name} is missing"
        elif not fits(hint, content.get(name)):
            yield f"{above}{name} is of another type"


def _bad_config(record: RunRecord) -> list[str]:
    """Return what is wrong with the config as a whole one: today's defaults have no part in a replay."""
    config = {"stages": [], "stop_after": None, **record.config, "tracker": {}}  # a replay logs nowhere
    faults = [str(fault) for fault in check(config, list(installed_stages()))]
    if faults:
        return [f"config: {fault}" for fault in faults]
    kinds = stage_configs()
    needed = ["stages", "stop_after", *key_names(kinds[name] for name in config["stages"])]
    missing = [f"config: {key} is missing" for key in needed if key not in record.config]
    ran = {stage["name"] for stage in record.data["stages"]}
    return missing + [f"stages: {name!r} is none of the config's" for name in ran - set(config["stages"])]


def outputs_for(record: Path) -> Path:
    """Return where a replay of ``record`` writes: the ``outputs`` folder that it lies in, else that of the current one.

    It lies in one wherever that was moved to, and however its run or its sweep was named below ``runs`` or
    ``multirun``. What the record says is not asked: its author may have named any folder of this machine.
    """
    folder = record.absolute().parent
    trees = (above.parent for above in folder.parents if above.name in ("runs", "multirun"))
    return next((tree for tree in trees if os.access(tree, os.W_OK)), Path("outputs").absolute())
