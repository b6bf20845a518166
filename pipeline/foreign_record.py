"""A record that somebody else may have written: data, held to its shape.

What it names is judged by ``offstage.pipeline.trust``.
"""

from __future__ import annotations

import os
from pathlib import Path

from offstage.pipeline.config import check
from offstage.pipeline.errors import ReplayError, StorageError
from offstage.pipeline.installed_stages import installed_stages, stage_configs
from offstage.pipeline.plain_data import LARGEST, scalars
from offstage.pipeline.record import RunRecord
from offstage.pipeline.typed_config import key_names

_SHOWN = 3


def load_foreign(run: Path) -> RunRecord:
    """Return the completed run that ``run`` records, of the shape that a run writes, with a config that can be run.

    Raises ``ReplayError`` where there is nothing to repeat: no record, a damaged one, or one of a run without an end.
    """
    try:
        record = RunRecord.load(run)
    except StorageError as error:
        raise ReplayError(str(error)) from error
    if record.run.status != "completed":
        raise ReplayError(
            f"{run}: the run is {record.run.status}, so there is no result to compare with; replay one that completed"
        )
    wild = any(isinstance(value, int | float) and not abs(value) < LARGEST for value in scalars(record.data))
    faults = ["it holds a number beyond 64 bits, or one that is none"] if wild else _bad_config(record)
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ReplayError(f"{record.path}: damaged: {'; '.join(faults[:_SHOWN])}{more}; restore the file")
    return record


def _bad_config(record: RunRecord) -> list[str]:
    """Return what is wrong with the config as a whole one: today's defaults have no part in a replay."""
    config = {"stages": [], "stop_after": None, **record.config, "tracker": {}}  # a replay logs nowhere
    faults = [str(fault) for fault in check(config, list(installed_stages()))]
    if faults:
        return [f"config: {fault}" for fault in faults]
    kinds = stage_configs()
    needed = ["stages", "stop_after", *key_names(kinds[name] for name in config["stages"])]
    missing = [f"config: {key} is missing" for key in needed if key not in record.config]
    ran = {stage.name for stage in record.run.stages}
    return missing + [f"stages: {name!r} is none of the config's" for name in ran - set(config["stages"])]


def outputs_for(record: Path) -> Path:
    """Return where a replay of ``record`` writes: the ``outputs`` folder that it lies in, else that of the current one.

    It lies in one wherever that was moved to, and however its run or its sweep was named below ``runs`` or
    ``multirun``. What the record says is not asked: its author may have named any folder of this machine.
    """
    folder = record.absolute().parent
    trees = (above.parent for above in folder.parents if above.name in ("runs", "multirun"))
    return next((tree for tree in trees if os.access(tree, os.W_OK)), Path("outputs").absolute())
