"""What a model is, as far as it can be told without importing its code.

These values go into keys: a run that is served from the cache must be able to compute them in milliseconds, so
nothing here imports torch, transformers or the user's module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from offstage.pipeline.errors import CheckpointError, ConfigError
from offstage.pipeline.plain_data import walk
from offstage.pipeline.regular_files import read_object, read_regular
from offstage.pipeline.stage import SourceFiles
from offstage.stages.checkpoints.adapters import CONFIG as ADAPTER_CONFIG, adapter_folder, settings_identity
from offstage.stages.checkpoints.checkpoint import Checkpoint
from offstage.stages.checkpoints.config_files import parse_config
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.model_source import ModelSource, is_hub_id
from offstage.stages.checkpoints.quantization import (
    KEYS as QUANTISED,
    SERVED,
    advice_for,
    check_scheme,
    method_of,
    quantization_of,
)
from offstage.stages.checkpoints.safetensors_header import read_header
from offstage.stages.checkpoints.shard_files import TEXTS, is_plain_name
from offstage.stages.checkpoints.weight_files import gguf_file, weight_files
from offstage.stages.empty_init.source_code import code_identity, hashes, imports, source_files

MODEL_KEYS: Mapping[str, object] = {
    "kind": "pretrained", "path": None, "revision": None, "class": None, "tokenizer": None, "no_split": None,
    "trust_remote_code": False, "allow_links": False, "adapter": None, "attn_implementation": None, "quantize": None,
}  # fmt: skip
"""What may stand under ``model`` where it is a checkpoint, with its default."""

OWN_KEYS = MODEL_KEYS.keys() - {"class", "quantize"}
"""The keys of ``model`` that are ours; for ``model=module`` all others are arguments of its constructor."""

_DTYPES = ("float32", "float16", "bfloat16", "float64")
"""What a model may be in; a checkpoint's first tensor of one of them tells which."""

_BESIDE_MODELS = ("scheduler", "tokenizer", "feature_extractor", "image_processor")
"""How the names begin of those parts of a pipeline of diffusers that aren't models."""

WHERE_CODE_IS_FOUND = "give PACKAGE.MODULE.CLASS, with the package installed, on PYTHONPATH or in the current folder"


def identity(model: Mapping[str, Any]) -> dict[str, object]:
    """Return what the model depends on but for its weights, for the node ``model`` of a config.

    A pretrained model is its config's bytes, its class, the versions of the libraries and, where its own code is
    trusted, that code; a module is its target, its arguments in their order, and all code that they name. A
    ``CheckpointError`` where the config says that the weights are quantised by a method that isn't served.
    """
    torch = metadata.version("torch")
    if model["kind"] == "module":
        arguments = constructor_arguments(model)
        code = code_identity(filter(_is_dotted, _texts(arguments)))
        order = tuple(place for place, _ in walk(arguments))  # a constructor may make its layers in it
        own = {"arguments": arguments, "order": order, "no_split": model.get("no_split"), "code": code}
        return {"kind": "module", "torch": torch, **own}
    folder, override = ModelSource.of(model).folder, model.get("class")
    quantised = quantization_fault(folder)
    if quantised:
        raise CheckpointError(f"model.path: {quantised}")
    return {
        "kind": "pretrained",
        "config": read_config_bytes(folder),
        "class": override,
        "class_code": code_identity([str(override)]) if _is_dotted(override) else {},
        "no_split": model.get("no_split"),
        "transformers": metadata.version("transformers"),
        "diffusers": _diffusers(folder),
        "torch": torch,
        "code": remote_code(folder, "config.json") if model.get("trust_remote_code") else {},
        "adapter": _adapter(model),
        **({"attention": model["attn_implementation"]} if model.get("attn_implementation") else {}),
        **({"quantize": model["quantize"]} if model.get("quantize") else {}),
    }


def model_sources(identified: Mapping[str, Any]) -> SourceFiles:
    """Return the files that what ``identity`` returned, ``identified``, was read from: config, code, adapter's config.

    Code of an installed package stands as its version, as in a key.
    """
    config, adapter = identified.get("config"), identified.get("adapter")
    sections = {
        "config": {"config.json": hashlib.sha256(config).hexdigest()} if config is not None else {},
        "code": {**identified.get("class_code", {}), **identified["code"]},
        "adapter": {ADAPTER_CONFIG: adapter["config"]} if adapter else {},
    }
    return SourceFiles({name: section for name, section in sections.items() if section})


def _adapter(model: Mapping[str, Any]) -> dict[str, str] | None:
    """Return what an adapter says of itself, and the version of what applies it; its weights are the loader's."""
    folder = adapter_folder(model)
    return None if folder is None else {"config": settings_identity(folder), "peft": metadata.version("peft")}


def is_of_diffusers(config: Mapping[str, Any]) -> bool:
    """Return whether a ``config.json`` is that of a model of diffusers, which names its class there."""
    return isinstance(config.get("_class_name"), str) and "model_type" not in config


def _diffusers(folder: Path) -> str | None:
    """Return the version of diffusers where the model in ``folder`` is one of its; a ``ConfigError`` if it lacks."""
    config = read_config(folder)
    if not is_of_diffusers(config):
        return None
    if find_spec("diffusers") is None:
        raise ConfigError(
            f"model.path: {str(folder)!r} holds a model of diffusers ({config['_class_name'][:80]}), which isn't "
            "installed; pip install 'offstage-pipeline[diffusers]'"
        )
    return metadata.version("diffusers")


def pipeline_fault(folder: Path) -> str | None:
    """Return why the pipeline of diffusers in ``folder`` is no model, and which ones it is made of; else null."""
    if (folder / "config.json").exists():
        return None
    listed = read_object(folder / "model_index.json")
    parts = sorted(name for name in listed if is_plain_name(name) and (folder / name / "config.json").is_file())
    models = [name for name in parts if not name.startswith(_BESIDE_MODELS)]
    if not models:
        return None
    each = ", ".join(str(folder / name) for name in models)
    return f"{str(folder)!r} is a pipeline of diffusers, made of several models; give the folder of one: {each}"


def remote_code(folder: Path, names_it: str) -> dict[str, str]:
    """Return what a checkpoint's own code is: all in ``folder``, what it imports, and that of other checkpoints.

    The file ``names_it`` of the folder says in its ``auto_map`` which classes there are; a class of another checkpoint
    is written there as ``REPOSITORY--MODULE.CLASS``.
    """
    folders = {"": folder}
    for reference in _texts(read_object(folder / names_it).get("auto_map")):
        repository, separator, _ = reference.partition("--")
        if separator:
            folders[f"{repository}/"] = ModelSource(repository).folder
    files = {name: source_files(place) for name, place in folders.items()}
    hashes_of = {
        f"{name}{file}": digest
        for name, place in folders.items()
        for file, digest in hashes(files[name], place).items()
    }
    return hashes_of | code_identity(imports(file for group in files.values() for file in group))


def text_identity(model: Mapping[str, Any]) -> dict[str, object]:
    """Return what says how text and media become a model's inputs, and which options are the default: files by their
    role, by content. Where the checkpoint's own code is trusted, a tokenizer's is a part of it.
    """
    source = ModelSource.of(model)
    roles = {"checkpoint": source.folder, "tokenizer": source.tokenizer_folder}
    folders = {role: folder for role, folder in roles.items() if folder is not None}
    files: dict[str, object] = {role: hashes(_text_files(folder), folder) for role, folder in folders.items()}
    if model.get("trust_remote_code"):
        files["code"] = {role: remote_code(folder, "tokenizer_config.json") for role, folder in folders.items()}
    return files


def _text_files(folder: Path) -> list[Path]:
    """Return the files of ``folder`` that a tokenizer, a processor or the default options may be read from."""
    files = {file for pattern in TEXTS for file in folder.glob(pattern) if file.is_file()}
    return sorted(file for file in files if not file.name.endswith(".index.json"))


def quantization_fault(folder: Path) -> str | None:
    """Return why the weights in ``folder`` can't be used, where its config declares them quantised; else null.

    Without what their scales say, the numbers of a quantised checkpoint are those of no model.
    """
    served = quantization_of(folder)
    configs = (config for _, config in walk(read_config(folder)) if isinstance(config, Mapping))
    declared = [(key, config[key]) for config in configs for key in QUANTISED if config.get(key)]
    others = ((key, value) for key, value in declared if value != served or method_of(value) not in SERVED)
    key, value = next(others, ("", None))
    if not key:
        return _scheme_fault(folder, served)
    method = method_of(value)
    return (
        f"{str(folder / 'config.json')!r} declares quantised weights ({key}, quant_method: {method!r}), "
        f"which aren't served; {advice_for(method)}; or take {key} out of the config if these are plain"
    )


def _scheme_fault(folder: Path, served: Mapping[str, object] | None) -> str | None:
    """Return what of the method that the config in ``folder`` declares isn't served, though others of it are."""
    try:
        check_scheme(served or {})
    except CheckpointError as error:
        return f"{str(folder / 'config.json')!r} declares {error}"
    return None


def is_plan(config: Mapping[str, Any]) -> bool:
    """Return whether a run of ``config`` ends before it loads weights: what isn't here then isn't downloaded."""
    names, last = list(config.get("stages") or ()), config.get("stop_after")
    return "shard_load" not in (names[: names.index(last) + 1] if last in names else names)


def open_packed(model: Mapping[str, Any], *, plans: bool = False) -> Checkpoint | None:
    """Open the checkpoint of the config's ``model`` with its headers, if its tensors rest packed, by what it says, or
    are to be quantised.

    Of one on the Hub, a run that ``plans`` alone has the headers and no more. Null too where of such a
    checkpoint nothing is here but its config: see ``has_config_alone``.
    """
    packed = quantises(model) is not None or method_at_rest(model) is not None
    return _opened(model, plans=plans) if packed and not has_config_alone(model) else None


def quantises(model: Mapping[str, Any]) -> str | None:
    """Return the format that the plain checkpoint of the config's ``model`` is to be quantised to, if it is."""
    return model.get("quantize") or None if model.get("kind") == "pretrained" else None


def _opened(model: Mapping[str, Any], *, plans: bool) -> Checkpoint:
    source = ModelSource.of(model)
    if plans and source.lacks_weights:
        from offstage.stages.checkpoints.hub_headers import remote_checkpoint

        return remote_checkpoint(source)
    return source.open()


def method_at_rest(model: Mapping[str, Any]) -> str | None:
    """Return what the weights of the config's ``model`` are quantised by, as its small files tell: ``GGUF``, or the
    method that its config declares; null for plain ones.
    """
    if model["kind"] != "pretrained":
        return None
    if gguf_file(Path(model["path"])) is not None:
        return "GGUF"
    declared = quantization_of(ModelSource.of(model).folder)
    return None if declared is None else method_of(declared)


def declared_packed(model: Mapping[str, Any]) -> Mapping[str, object] | None:
    """Return how the config of a folder declares weights quantised of which no file is there; else null."""
    return quantization_of(Path(model["path"])) if has_config_alone(model) else None


def has_config_alone(model: Mapping[str, Any]) -> bool:
    """Return whether of the config's ``model`` there is a folder without weights.

    It is enough for a plan; whatever needs the weights says that they are missing.
    """
    if model["kind"] != "pretrained" or is_hub_id(model["path"]):
        return False
    folder = Path(model["path"])
    return folder.is_dir() and not weight_files(folder)


def constructor_arguments(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``_target_`` and the constructor arguments of ``model=module``: every key that isn't ours."""
    return {str(key): value for key, value in model.items() if key not in OWN_KEYS}


def _texts(value: object) -> Iterator[str]:
    """Yield every text in ``value``: any of them may name code (a ``_target_`` inside, a class for a factory)."""
    return (inner for _, inner in walk(value) if isinstance(inner, str))


def _is_dotted(text: object) -> bool:
    """Return whether ``text`` reads as the dotted name of something in a module."""
    return isinstance(text, str) and "." in text and all(part.isidentifier() for part in text.split("."))


def read_config_bytes(folder: Path) -> bytes:
    """Return the bytes of a checkpoint folder's ``config.json``; a ``CheckpointError`` if there is none."""
    try:
        return read_regular(folder / "config.json")
    except OSError as error:
        advice = "give a checkpoint folder as save_pretrained writes it"
        if (folder / ADAPTER_CONFIG).is_file():
            advice = "it holds an adapter: give it as model.adapter, and as model.path the model that it is for"
        raise CheckpointError(
            f"model.path: {str(folder)!r} has no readable config.json ({error.strerror}); {advice}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint folder's ``config.json`` says; a ``CheckpointError`` if it isn't a JSON object."""
    return parse_config(folder / "config.json", read_config_bytes(folder))


def resolve_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype that the config's ``dtype`` stands for.

    ``auto`` is what a checkpoint's ``config.json`` declares, else the dtype of the first floating tensor of its first
    safetensors file, else float32; of a quantised one of which only the config is here, bfloat16, which the published
    ones have. For ``model=module`` it stays ``auto``: whatever the constructor makes.
    """
    dtype, model = str(config["dtype"]), config["model"]
    if dtype != "auto" or model["kind"] == "module":
        return dtype
    declared = declared_dtype(ModelSource.of(model).folder) or _stored_dtype(model, plans=is_plan(config))
    return declared or ("float32" if declared_packed(model) is None else "bfloat16")


def declared_dtype(folder: Path) -> str | None:
    """Return the dtype that the config in ``folder`` declares, if it does."""
    config = read_config(folder)
    nested = config.get("text_config")
    places = [config, nested if isinstance(nested, Mapping) else {}]
    values = [place.get(key) for place in places for key in ("dtype", "torch_dtype")]
    declared = next((value for value in values if isinstance(value, str) and value != "auto"), None)
    return declared and declared.removeprefix("torch.")


def _stored_dtype(model: Mapping[str, Any], *, plans: bool) -> str | None:
    source = ModelSource.of(model)
    if plans and source.lacks_weights:
        return _first_dtype(_opened(model, plans=plans).entries)
    for file in weight_files(source.weights)[:1]:
        if file.suffix != ".safetensors":
            return None
        try:
            _, entries = read_header(file)
        except CheckpointError:
            return None  # shard_load refuses the file by name
        return _first_dtype(entries)
    return None


def _first_dtype(entries: Mapping[str, Extent]) -> str | None:
    return next((entry.dtype for entry in entries.values() if entry.dtype in _DTYPES), None)
