"""The typed schema of the config, and its checks.

Every fault of a config is found before any work and all are reported together, so value checks are made here and by
the stages, not by the first line of code that trips over a value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Dict, List, Optional  # noqa: UP035 - OmegaConf reads these annotations

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from pipeline.errors import ConfigError, Fault, closest

Device = Enum("Device", {**{str(i): i for i in range(16)}, "cpu": "cpu", "disk": "disk"})  # type: ignore[misc]
"""The keys of ``max_memory``. OmegaConf finds a member by name from a string and by value from an int, so that YAML's
``0`` and the command line's ``max_memory.0`` meet in one key."""

DTYPES = ("auto", "float32", "float16", "bfloat16")
TRACKERS = ("mlflow", "trackio")
_MODEL_KEYS = ("kind", "path", "revision", "class", "tokenizer", "no_split", "trust_remote_code", "allow_links")
_OPEN_NODES = ("model", "max_memory", "device_map_overrides", "hardware", "generate", "tracker")
_HUB_PATHS = ("model.path", "model.tokenizer")
_PATHS = ("outputs", "offload_folder", "model.path", "model.tokenizer", "generate.prompts_file", "tracker.folder")
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")


@dataclass
class Schema:
    """The root of the config; ``conf/config.yaml`` says what each key means.

    Scalars are checked by ``check`` and not by OmegaConf, which would report one fault at a time.
    """

    model: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006
    dtype: Any = "auto"
    max_memory: Optional[Dict[Device, str]] = field(default_factory=dict)  # noqa: UP006, UP045
    device_map: Any = "optimal"
    device_map_overrides: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006
    offload_folder: Any = None
    offload_state_dict: Any = False
    strict: Any = True
    check_finite: Any = False
    verify: Any = "headers"
    storage: Dict[str, Any] = field(default_factory=lambda: {"io": "auto"})  # noqa: UP006
    trace: Any = False
    hardware: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006
    generate: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006
    stages: List[str] = field(default_factory=list)  # noqa: UP006
    stop_after: Any = None
    seed: Any = 0
    outputs: Any = "outputs"
    enforce_memory: Any = False
    tracker: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006


def register() -> None:
    """Make the schema and the resolvers known to Hydra; calling it again changes nothing."""
    node = OmegaConf.structured(Schema)
    for name in _OPEN_NODES:  # a dotted override may add a key there: max_memory.1=3GB, generate.num_beams=2
        OmegaConf.set_struct(node[name], False)
    ConfigStore.instance().store("schema", node)
    OmegaConf.register_new_resolver("offstage.pid", os.getpid, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("offstage.batch", _batch, replace=True)
    OmegaConf.register_new_resolver("offstage.embedded", _embedded, replace=True)


def _embedded(name: str) -> str:
    return str(resources.files("conf").joinpath("checkpoints", name))


def _batch(launcher: str) -> int | None:
    """Return how many jobs of a sweep run at a time: one on this machine, all of them on a cluster."""
    return 1 if launcher.endswith(".LocalLauncher") else None


def resolve(config: DictConfig) -> dict[str, Any]:
    """Return ``config`` as plain dicts, lists and scalars, interpolations resolved and paths absolute.

    ``max_memory`` gets str keys. Raises a ``ConfigError`` that names every mandatory value (``???``) not given.
    """
    missing = sorted(str(key) for key in OmegaConf.missing_keys(config))
    if missing:
        raise ConfigError("\n".join(f"{key}: no value; give one: {key}=…" for key in missing))
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    plain["max_memory"] = {key.name: str(value) for key, value in (plain["max_memory"] or {}).items()}
    for dotted in _PATHS:
        _make_absolute(plain, dotted)
    return {str(key): value for key, value in plain.items()}


def _make_absolute(plain: dict[Any, Any], dotted: str) -> None:
    """Make the path under the ``dotted`` key absolute, so that a record means the same from any folder."""
    *parents, last = dotted.split(".")
    node = plain
    for key in parents:
        node = node.get(key) or {}
    if dotted in _HUB_PATHS and _names_hub(node.get(last)):
        return
    if isinstance(node.get(last), str) and node[last]:
        node[last] = str(Path(node[last]).expanduser().absolute())


def _names_hub(path: Any) -> bool:
    """Return whether ``path`` reads ``org/name`` and nothing is there: the id of a checkpoint on the Hub."""
    return isinstance(path, str) and bool(_HUB_ID.fullmatch(path)) and not Path(path).exists()


def check(config: Mapping[str, Any], known_stages: Sequence[str]) -> Iterable[Fault]:
    """Yield what is wrong with the keys that belong to no single stage."""
    yield from _unknown_keys(config)
    if config["dtype"] not in DTYPES:
        near = closest(str(config["dtype"]), DTYPES)
        yield Fault("dtype", f"{config['dtype']!r} is no dtype{near}; give one of {', '.join(DTYPES)}")
    yield from _check_scalars(config)
    yield from _check_stages(config, known_stages)
    yield from _check_tracker(config.get("tracker") or {})


def _unknown_keys(config: Mapping[str, Any]) -> Iterable[Fault]:
    known = [entry.name for entry in fields(Schema)]
    for key in config.keys() - set(known):
        yield Fault(key, f"unknown key{closest(key, known)}; offstage --cfg job shows every key")
    model = config["model"]
    if model.get("kind") not in ("pretrained", "module"):
        yield Fault("model.kind", f"{model.get('kind')!r} is no kind of model; give model=pretrained or model=module")
    elif model["kind"] == "pretrained":
        for key in model.keys() - set(_MODEL_KEYS):
            yield Fault(f"model.{key}", f"unknown key{closest(key, _MODEL_KEYS)}")


def _check_scalars(config: Mapping[str, Any]) -> Iterable[Fault]:
    seed = config["seed"]
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        yield Fault("seed", f"{seed!r} is no seed; give a whole number from 0 to 2**63 - 1")
    flags = {key: config.get(key, False) for key in ("offload_state_dict", "enforce_memory")}
    flags["model.trust_remote_code"] = config["model"].get("trust_remote_code", False)
    for key, value in flags.items():
        if not isinstance(value, bool):
            yield Fault(key, f"{value!r} is neither true nor false")
    for key in ("outputs", "offload_folder"):
        value = config[key]
        if (not isinstance(value, str) or not value) and not (key == "offload_folder" and value is None):
            yield Fault(key, f"{value!r} is no path of a folder")


def _check_tracker(tracker: Mapping[str, Any]) -> Iterable[Fault]:
    kind = tracker.get("kind")
    if kind is None:
        return
    if kind not in TRACKERS:
        yield Fault("tracker.kind", f"{kind!r} is no tracker{closest(str(kind), TRACKERS)}; give tracker=none")
    elif find_spec(kind) is None:
        yield Fault("tracker", f"{kind} isn't installed; pip install 'offstage-pipeline[{kind}]', or tracker=none")


def _check_stages(config: Mapping[str, Any], known_stages: Sequence[str]) -> Iterable[Fault]:
    chosen = config["stages"]
    if not chosen:
        yield Fault("stages", "the list is empty; stages=generate runs them all")
    for name in chosen:
        if name not in known_stages:
            near = closest(name, known_stages)
            yield Fault("stages", f"{name!r} is no stage{near}; installed are {', '.join(known_stages)}")
    last = config["stop_after"]
    if last is not None and last not in chosen:
        yield Fault("stop_after", f"{last!r} is not among the stages {', '.join(chosen)}{closest(str(last), chosen)}")
