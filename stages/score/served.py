"""Which models can score: those that foretell the next token of a text."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from offstage.pipeline.errors import Fault, OffstageError
from offstage.stages.empty_init.model import read_class
from offstage.stages.inputs.texts import ScoreOptions
from offstage.stages.score.likelihoods import has_encoder
from offstage.stages.score.windows import check_encoded_texts


def check_served(options: ScoreOptions, model: Mapping[str, Any]) -> Iterable[Fault]:
    """Yield why the checkpoint of the config's ``model`` can't score, or what is wrong with the texts for it.

    A ``model`` of ``kind=module`` is taken to foretell tokens: what it returns is seen when it is called.
    """
    if model.get("kind") != "pretrained":
        yield from check_encoded_texts(options, model, has_encoder=False)
        return
    try:
        _, model_class = read_class(model)
    except OffstageError:
        return  # said as the model is built
    reason = _unserved(model_class)
    if reason:
        yield Fault(
            "model.class",
            f"{model_class.__name__} {reason}, so it can't score texts; give a checkpoint of a language model, or set "
            "model.class to the one with its head",
        )
        return
    yield from check_encoded_texts(options, model, has_encoder=has_encoder(model_class))


def _unserved(model_class: Any) -> str:
    """Return why a model of ``model_class`` can't score, an empty string if it can."""
    if not model_class.can_generate():
        return "gives no logits of the token that comes next"
    if "input_ids" not in inspect.signature(model_class.forward).parameters:
        return f"reads {model_class.main_input_name} and no token ids"
    if has_encoder(model_class) and not hasattr(model_class, "prepare_decoder_input_ids_from_labels"):
        return "doesn't say what its decoder begins with (it has no prepare_decoder_input_ids_from_labels)"
    return ""
