"""The model of a config, built without its weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from hydra.utils import instantiate
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from offstage.pipeline.errors import CheckpointError, ConfigError, closest, errors_alone, foreign
from offstage.stages.checkpoints.adapters import adapter_folder
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.generation_defaults import read_generation_config
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.quantization import KEYS as QUANTISED
from offstage.stages.empty_init.adapted_model import add_adapter
from offstage.stages.empty_init.config_limits import check_numbers
from offstage.stages.empty_init.identity import constructor_arguments, is_of_diffusers, read_config
from offstage.stages.empty_init.init import init_empty_weights
from offstage.stages.empty_init.targets import check_targets, module_class
from offstage.stages.empty_init.transformers_import import import_models

_DEFAULT_CLASSES = (
    "AutoModelForSpeechSeq2Seq", "AutoModelForImageTextToText", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM",
    "AutoModel",
)  # fmt: skip
"""Where a config names no class, the first of these that has one for it: of a whole model before one of a part."""


def build_model(node: Mapping[str, Any], dtype: str) -> nn.Module:
    """Return the model that the config's ``node`` declares, in eval mode, with parameters on meta and buffers computed.

    Parameters have the ``dtype`` that they will be loaded in; ``auto`` is what a module's constructor makes. Nothing of
    the checkpoint but its ``config.json`` is read, and of an adapter its own; of one that generates also what it says
    of that.
    """
    import_models()
    with errors_alone(transformers.logging):
        model: Any = _build_module(node, dtype) if node["kind"] == "module" else _build_pretrained(node, dtype)
    if getattr(model, "can_generate", lambda: False)():
        model.generation_config = read_generation_config(ModelSource.of(node).folder) or model.generation_config
    folder = adapter_folder(node)
    if folder is not None:
        add_adapter(model, folder)
    built: nn.Module = model.eval().requires_grad_(False)
    _fold_rows(built)
    return built


def _fold_rows(model: nn.Module) -> None:
    """Have the head of ``model`` multiply all rows that it is given at once.

    It is given the last position of each sequence, of which torch makes a product for each sequence with a copy of the
    weight in its memory, unless the weight learns: the plain model's does, and these have the bits of its product.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Module):
        head.register_forward_pre_hook(_as_rows)


def _as_rows(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``arguments`` of a head, the first with its rows one after the other: copied where they weren't."""
    rows = arguments[0] if arguments else None
    if not isinstance(rows, torch.Tensor) or all(
        rows.stride(axis) == rows.stride(axis + 1) * rows.shape[axis + 1] for axis in range(rows.dim() - 2)
    ):
        return arguments
    return (rows.clone(memory_format=torch.contiguous_format), *arguments[1:])


def _build_module(node: Mapping[str, Any], dtype: str) -> nn.Module:
    arguments, target = constructor_arguments(node), node["_target_"]
    check_targets(arguments)
    with foreign(ConfigError, f"model._target_: {target!r} can't be built"), init_empty_weights():
        model = instantiate(arguments)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model._target_: {target!r} made a {type(model).__name__}, not a torch.nn.Module")
    return model if dtype == "auto" else model.to(torch_dtype(dtype))


def _build_pretrained(node: Mapping[str, Any], dtype: str) -> nn.Module:
    folder = ModelSource.of(node).folder
    described = read_config(folder)
    if is_of_diffusers(described):
        return _build_diffusers(node, described, dtype)
    check_numbers(folder / "config.json", described)
    with foreign(CheckpointError, f"{folder / 'config.json'}: no model can be built from it"):
        config, model_class = read_class(node)
        with init_empty_weights(), _as_loaded(), _attention(node) as attention:
            model = model_class._from_config(config, dtype=torch_dtype(dtype), **attention)
        model.tie_weights()
        _apply_dtype_plan(model, torch_dtype(dtype))
    return model  # type: ignore[no-any-return]


@contextmanager
def _attention(node: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the argument that says how attention is computed, if ``node`` does; what refuses it is told by its key."""
    name = node.get("attn_implementation")
    if name is None:
        yield {}
        return
    with foreign(ConfigError, f"model.attn_implementation: {name!r} isn't served"):
        yield {"attn_implementation": name}


@contextmanager
def _as_loaded() -> Iterator[None]:
    """Mark parameters as transformers marks loaded ones, so that it doesn't initialise what has no data."""

    def mark(_module: nn.Module, _name: str, parameter: Any) -> None:
        parameter._is_hf_initialized = True

    hook = register_module_parameter_registration_hook(mark)
    try:
        yield
    finally:
        hook.remove()


def _build_diffusers(node: Mapping[str, Any], described: Mapping[str, Any], dtype: str) -> nn.Module:
    for key in ("class", "attn_implementation"):
        if node.get(key):
            raise ConfigError(f"model.{key}: {node[key]!r} has no say in a model of diffusers; leave it null")
    from offstage.stages.empty_init.diffusers_model import build_diffusers

    return build_diffusers(ModelSource.of(node).folder, described, torch_dtype(dtype))


def read_class(node: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return transformers' config of the pretrained model that ``node`` declares, and its class."""
    folder, remote = ModelSource.of(node).folder, bool(node.get("trust_remote_code"))
    with foreign(CheckpointError, f"{folder / 'config.json'}: no model can be built from it"):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=remote, local_files_only=True)
        _forget_quantization(config)
        return config, _model_class(node.get("class"), config, folder=folder, remote=remote)


def _forget_quantization(config: Any) -> None:
    """Take from ``config`` how weights rest: the model has them as they are used, and is saved so."""
    for part in (config, config.get_text_config()):
        part.__dict__.pop(QUANTISED[0], None)


def _model_class(override: str | None, config: Any, *, folder: Path, remote: bool) -> Any:
    """Return the class that the config override, the checkpoint's own code, or its ``architectures`` name."""
    if override and "." in override:
        return _dotted_class(override)
    name = override or next(iter(config.architectures or ()), None)
    auto_map = getattr(config, "auto_map", None) or {}
    reference = next((auto_map[key] for key in auto_map if key.startswith("AutoModel")), None)
    if remote and reference and not override:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(reference, folder)
    if name is None:
        return _default_class(config)
    candidate = getattr(transformers, name, None)
    mapping = getattr(candidate, "_model_mapping", {})
    if type(config) in mapping:  # one of the Auto classes: it stands for the class of this config
        return mapping[type(config)]
    if not _is_model(candidate):
        where = "model.class" if override else f"{folder / 'config.json'}: architectures"
        raise (ConfigError if override else CheckpointError)(
            f"{where}: {name!r} is no class of transformers {transformers.__version__} for a {config.model_type!r} "
            f"model{closest(name, _classes_for(config))}; set model.class"
        )
    return candidate


def _classes_for(config: Any) -> Iterator[str]:
    """Yield the names of the classes that a model of ``config`` may be of, and the Auto classes that mean them."""
    for auto in filter(re.compile("AutoModel").match, dir(transformers)):
        mapping = getattr(getattr(transformers, auto), "_model_mapping", {})
        if type(config) in mapping and _is_model(mapping[type(config)]):
            yield from (auto, mapping[type(config)].__name__)


def _is_model(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module) and hasattr(value, "_from_config")


def _dotted_class(dotted: str) -> Any:
    candidate = module_class(dotted, "model.class")
    if not _is_model(candidate):
        raise ConfigError(f"model.class: {dotted!r} is no class of transformers' PreTrainedModel; use model=module")
    return candidate


def _default_class(config: Any) -> Any:
    for name in _DEFAULT_CLASSES:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise CheckpointError(f"config.json: {config.model_type!r} says no architectures; set model.class")


def _apply_dtype_plan(model: Any, dtype: torch.dtype) -> None:
    """Keep in float32 the parameters that the model class declares so (T5's ``wo``), as transformers does."""
    in_float32 = kept_in_float32(model, strictly=dtype != torch.float16)
    if dtype in (torch.float16, torch.bfloat16) and in_float32 is not None:
        for name, parameter in model.named_parameters():
            if in_float32.search(name):
                parameter.data = parameter.data.float()


def kept_in_float32(model: nn.Module, *, strictly: bool = False) -> re.Pattern[str] | None:
    """Return what the names of weights have in them that the class of ``model`` keeps in float32; null for none.

    With ``strictly`` those that it keeps so in bfloat16 too.
    """
    declared = ("_keep_in_fp32_modules_strict", *(() if strictly else ("_keep_in_fp32_modules",)))
    patterns = {pattern for name in declared for pattern in getattr(model, name, None) or ()}
    return re.compile("|".join(pattern.replace("*", ".*") for pattern in sorted(patterns))) if patterns else None
