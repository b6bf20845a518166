"""Log-likelihoods of tokens: one forward of windows, and the log-softmax of what it gives.

The logits of a window are what the model's plain call gives, all at once, since a product of fewer rows may differ in
its last bits. Their log-softmax in float32 is taken some positions at a time: a row's doesn't depend on the others.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offstage.pipeline.errors import ConfigError
from offstage.stages.inference.logits import logits_of
from offstage.stages.inference.padding import make_batch
from offstage.stages.plan.request.requests import NORMALISED
from offstage.stages.score.windows import Window

_PAD = 0
"""What fills a row on its right: no token before it sees it, so that any id will do."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of each scored token of a window: its log-likelihood, null where that is no finite number, and whether no other
    token is likelier.
    """

    values: list[float | None]
    greedy: list[bool]


def has_encoder(model: Any) -> bool:
    """Return whether ``model``, or a class of models, has an encoder that reads the context of what is scored."""
    return "decoder_input_ids" in inspect.signature(model.forward).parameters


def require_causal(model: Any, device: torch.device) -> None:
    """Raise ``ConfigError`` if a token is told to ``model`` before it is asked for: then nothing is foretold.

    A model of the kind that decodes only if its config says so, and doesn't, is shown two texts of one beginning.
    """
    if getattr(getattr(model, "config", None), "is_decoder", None) is not False or has_encoder(model):
        return
    with torch.no_grad():
        one, other = (logits_of(model(torch.tensor([[0, last]], device=device)))[0, 0] for last in (0, 1))
    if not torch.equal(one, other):
        raise ConfigError(
            f"model.class: {type(model).__name__} sees what comes after a token (its config.json says is_decoder: "
            "false), so it can't score texts; give a checkpoint of a language model"
        )


def score_windows(model: nn.Module, windows: Sequence[Window], device: torch.device) -> list[TokenScores]:
    """Return the scores of each of ``windows``, which ``model`` gets in one batch, on ``device``."""
    with torch.no_grad():
        logits = logits_of(_call(model, windows, device))
        return [_likelihoods(own, window) for own, window in zip(logits, windows, strict=True)]


def _call(model: Any, windows: Sequence[Window], device: torch.device) -> Any:
    """Return what ``model`` makes of the windows. None is padded that is alone, and then there is no mask."""
    batch = make_batch([window.seen for window in windows], pad=_PAD, side="right")
    config = getattr(model, "config", None)
    if config is None:
        return model(batch.input_ids.to(device))
    parameters = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
    if has_encoder(model):
        options["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch.input_ids).to(device)
        batch = make_batch([window.source for window in windows], pad=_PAD, side="right")
    if not bool(batch.attention_mask.all()):
        options["attention_mask"] = batch.attention_mask.to(device)
    return model(input_ids=batch.input_ids.to(device), **options)


def _likelihoods(logits: torch.Tensor, window: Window) -> TokenScores:
    """Return the likelihoods of the scored tokens of ``window`` by its ``logits`` (positions, words).

    A position foretells the token after it; that of a decoder beside an encoder, whose input begins with a token of its
    own, the token at its place.
    """
    shift = 0 if window.source else 1
    begin, end = window.first - window.begin - shift, window.end - window.begin - shift
    values: list[float | None] = []
    greedy: list[bool] = []
    for start in range(begin - begin % NORMALISED, end, NORMALISED):
        rows = logits[start : min(start + NORMALISED, end)].float()
        wanted = torch.tensor(window.ids[start + shift : start + shift + len(rows)], device=rows.device)
        skipped = max(0, begin - start)
        chosen = rows.log_softmax(dim=-1).gather(-1, wanted[:, None])[skipped:, 0]
        values += [value if math.isfinite(value) else None for value in chosen.tolist()]
        greedy += (rows.argmax(dim=-1) == wanted)[skipped:].tolist()
    return TokenScores(values, greedy)
