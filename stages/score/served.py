"""Which models can score: those that foretell the next token of a text."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import transformers

from pipeline.errors import Fault, OffstageError
from stages.empty_init.model import read_class
from stages.plan.texts import ScoreOptions
from stages.score.windows import check_encoded_texts


def check_served(options: ScoreOptions, model: Mapping[str, Any]) -> Iterable[Fault]:
    """Yield why the checkpoint of the config's ``model`` can't score, or what is wrong with the texts for it.

    A ``model`` of ``kind=module`` is taken to foretell tokens: what it returns is seen when it is called.
    """
    if model["kind"] != "pretrained":
        yield from check_encoded_texts(options, model, has_encoder=False)
        return
    try:
        config, model_class = read_class(model)
    except OffstageError:
        return  # said as the model is built
    reason = _unserved(model_class)
    if reason:
        head = transformers.AutoModelForCausalLM._model_mapping.get(type(config), None)
        advice = f", such as model.class={head.__name__}" if head not in (None, model_class) else ""
        yield Fault(
            "model.class",
            f"{model_class.__name__} {reason}, so it can't score texts; give a checkpoint of a language model{advice}",
        )
        return
    yield from check_encoded_texts(options, model, has_encoder=bool(config.is_encoder_decoder))


def _unserved(model_class: Any) -> str:
    """Return why a model of ``model_class`` can't score, an empty string if it can."""
    if not model_class.can_generate():
        return "gives no logits of the token that comes next"
    if "input_ids" not in inspect.signature(model_class.forward).parameters:
        return f"reads {model_class.main_input_name} and no token ids"
    return ""
