"""Which models can be trained on a text: those that are told what comes next, and say how wrong they were."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from offstage.pipeline.errors import ConfigError, Fault, OffstageError
from offstage.stages.checkpoints.adapters import adapter_folder
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.empty_init.model import read_class
from offstage.stages.finetune.sequences import make_sequences
from offstage.stages.inputs.finetune_options import TEXT, FinetuneOptions
from offstage.stages.inputs.texts import read_text
from offstage.stages.plan.request.geometry import read_geometry

_INSTEAD = "give a checkpoint of a language model that decodes only, or set model.class to the one with its head"


def check_served(options: FinetuneOptions, model: Mapping[str, Any]) -> Iterable[Fault]:
    """Yield why the config's ``model`` can't be trained, or what is wrong with the text and the adapter for it."""
    if model.get("kind") != "pretrained":
        yield Fault("model.kind", "'module' says nothing of a loss, so it can't be trained here; give model=pretrained")
        return
    if options.lora is not None and adapter_folder(model) is not None:
        yield Fault("finetune.lora", "model.adapter is given too, which would be trained; give one of them")
    if options.lora is not None and find_spec("peft") is None:
        yield Fault("finetune.lora", "peft isn't installed, which applies it: pip install 'offstage-pipeline[adapter]'")
    try:
        config, model_class = read_class(model)
    except OffstageError:
        return  # said as the model is built
    if options.checkpointing and not getattr(model_class, "supports_gradient_checkpointing", False):
        yield Fault("finetune.checkpointing", f"{model_class.__name__} has no gradient checkpointing; set it to false")
    reason = _unserved(config, model_class)
    if reason:
        yield Fault("model.class", f"{model_class.__name__} {reason}, so it can't be trained on a text; {_INSTEAD}")
        return
    yield from _check_window(options, model)


def _unserved(config: Any, model_class: Any) -> str:
    """Return why a model of ``model_class`` can't be trained, an empty string if it can."""
    parameters = inspect.signature(model_class.forward).parameters
    if getattr(config, "is_encoder_decoder", False) or "decoder_input_ids" in parameters:
        return "has an encoder, which a text says nothing of"
    if not model_class.can_generate() or "labels" not in parameters:
        return "has no labels of the token that comes next"
    if "input_ids" not in parameters:
        return f"reads {model_class.main_input_name} and no token ids"
    if getattr(config, "is_decoder", None) is False:
        return "sees what comes after a token (its config.json says is_decoder: false)"
    return ""


def _check_window(options: FinetuneOptions, model: Mapping[str, Any]) -> Iterable[Fault]:
    """Yield a fault if no sequence can be made of the text, or one has no place in the model's context."""
    context = read_geometry(model).context
    window = options.sequence(context)
    if 0 < context < window:
        yield Fault("finetune.window", f"{window} tokens are more than the model's context of {context}")
        return
    if options.text_file is None or not ModelSource.of(model).folder.is_dir():
        return
    try:
        make_sequences(read_text(TEXT, options.text_file), model, window=window)
    except ConfigError as error:
        yield Fault.of(error)
