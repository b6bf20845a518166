"""What a classifier says, in words: the likeliest of its labels, or of the texts that images were held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

MOST = 5
"""Labels told of a row."""

Said = list[dict[str, Any]]
"""The likeliest labels of a row: ``{label, probability}``, the likeliest first."""


def say(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return, by the output's name, what the logits of each row say: the likeliest labels.

    ``config`` is the model's, whose ``id2label`` has the labels. Logits of each token (rows, length, labels) give the
    likeliest of each token. ``texts`` are the labels where logits are of images against texts. Other outputs say
    nothing.
    """
    labels = _labels(config)
    said: dict[str, list[Any]] = {}
    logits, against = tensors.get("logits"), tensors.get("logits_per_image")
    if logits is not None and len(labels) > 1 and logits.dim() in (2, 3) and logits.shape[-1] == len(labels):
        many = config.get("problem_type") == "multi_label_classification"
        scores = logits.float().sigmoid() if many else logits.float().softmax(dim=-1)
        said["logits"] = _top(scores, labels) if logits.dim() == 2 else _each(scores, labels)
    if against is not None and len(texts) > 1 and against.dim() == 2 and against.shape[1] == len(texts):
        said["logits_per_image"] = _top(against.float().softmax(dim=-1), texts)
    return said


def _labels(config: Mapping[str, Any]) -> list[str]:
    given = config.get("id2label")
    named = {str(key): str(value) for key, value in given.items()} if isinstance(given, Mapping) else {}
    return [named.get(str(place), f"LABEL_{place}") for place in range(len(named))]


def _top(scores: torch.Tensor, labels: Sequence[str]) -> list[Said]:
    top = scores.topk(min(MOST, len(labels)), dim=-1)
    return [
        [{"label": labels[place], "probability": round(score, 6)} for place, score in zip(row, values, strict=True)]
        for row, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]


def _each(scores: torch.Tensor, labels: Sequence[str]) -> list[list[str]]:
    return [[labels[place] for place in row] for row in scores.argmax(dim=-1).tolist()]
