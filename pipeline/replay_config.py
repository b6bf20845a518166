"""A record as it is run here, whoever wrote it: held to its shape, with places as they are on this machine.

A run notes where it was started and where it lies. What lay below one of these is looked for below the same folder
here, so that a project that was moved or sent as a whole is found; a bundle has small files of data with it. All else
the user names anew. What isn't its author's to choose (where is written, who is told) is never taken over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from offstage.pipeline.config import check, named_paths, path_keys, with_paths
from offstage.pipeline.errors import ReplayError, StorageError, closest
from offstage.pipeline.installed_stages import installed_stages, stage_configs
from offstage.pipeline.plain_data import LARGEST, scalars
from offstage.pipeline.record import RunRecord
from offstage.pipeline.typed_config import key_names

INPUTS = "inputs"
"""The folder of a bundle's run that has files of data, each in a folder by its key."""
_WRITTEN = ("outputs", "offload_folder", "tracker.folder")
"""The keys of places that are written to: a replay has its own."""
_MODEL_PATH = "model.path"
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


def config_here(then: RunRecord, outputs: Path, given: Mapping[str, str]) -> dict[str, Any]:
    """Return the config of ``then`` as it is run here, with the places that are ``given`` by key.

    Raises ``ReplayError`` where a place is neither here nor given: it names the key, and the option that gives it.
    """
    own = {"outputs": str(outputs), "offload_folder": None, "tracker": {"kind": None}}
    config = with_paths(
        {**then.config, **own},
        lambda key, path: path if key in _WRITTEN else given[key] if key in given else _here(then, key, path),
    )
    if _MODEL_PATH in given and Path(given[_MODEL_PATH]).exists():
        config["model"]["revision"] = None  # that of the Hub's, which a folder hasn't
    for key, place in given.items():  # a key that had no place
        above, _, last = key.rpartition(".")
        node = config.get(above) if above else config
        if isinstance(node, dict):
            node[last] = place
    missing = list(_missing(config))
    if missing:
        raise ReplayError(f"{then.path}: {'; '.join(missing)}")
    return config


def given_places(model_path: str | None, settings: Sequence[str]) -> dict[str, str]:
    """Return the place of each key that ``--model-path`` and ``--set KEY=VALUE`` give; paths are made absolute.

    A key may be given by its last part where that is one key's alone. Raises ``ReplayError`` for others.
    """
    values = {_MODEL_PATH: model_path} if model_path is not None else {}
    path_names = [key for key in path_keys() if key not in _WRITTEN]
    for setting in settings:
        name, separator, value = setting.partition("=")
        keys = [key for key in path_names if name in (key, key.rpartition(".")[2])]
        if not separator or not value or len(keys) != 1:
            near = f"; did you mean {closest(name, path_names)}" if closest(name, path_names) else ""
            raise ReplayError(
                f"--set {setting!r}: a place belongs here, as KEY=PATH, and KEY is one of {', '.join(path_names)}{near}"
            )
        values[keys[0]] = value
    locate = path_keys()
    return {key: locate[key](value) for key, value in values.items()}


def _here(then: RunRecord, key: str, path: str) -> str:
    """Return where the ``path`` of ``key``, which ``then`` names, lies here; as it is where nothing better is known."""
    if not Path(path).is_absolute():  # a Hub id
        return path
    return str(next((place for place in _candidates(then, key, Path(path)) if place.exists()), path))


def _candidates(then: RunRecord, key: str, path: Path) -> Iterator[Path]:
    noted = {name: place for name, text in (then.run.places or {}).items() if (place := Path(text)).is_absolute()}
    run, folder, conf = (noted.get(name) for name in ("run", "folder", "conf"))
    own = then.path.absolute().parent
    yield own / INPUTS / key / path.name
    if run is not None and path.is_relative_to(run):
        yield own / path.relative_to(run)
    yield path
    if conf is not None and path.is_relative_to(conf):  # what is shipped with offstage
        yield Path(str(resources.files("offstage.conf"))) / path.relative_to(conf)
    if folder is None or not path.is_relative_to(folder):
        return
    below = path.relative_to(folder)
    if run is not None and run.is_relative_to(folder):
        inside = run.relative_to(folder).parts
        if own.parts[-len(inside) :] == inside:  # the project was moved, or sent, as a whole
            yield Path(*own.parts[: -len(inside)]) / below
    yield Path.cwd() / below


def _missing(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what to say of each place of ``config`` that isn't here."""
    for key, path in named_paths(config):
        if key in _WRITTEN or not Path(path).is_absolute() or Path(path).exists():
            continue
        option = "--model-path FOLDER" if key == _MODEL_PATH else f"--set {key}=PATH"
        yield f"{key}: {path!r} isn't here; say where it is by {option}"
