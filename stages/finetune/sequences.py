"""The text as sequences of tokens, and which of them each step sees.

The text is cut into sequences of one length, side by side; what is left at its end is no sequence. Each round takes all
of them once, in an order that follows from the seed and the round's number alone: nothing has to be kept to go on from
any step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Any

import torch

from offstage.pipeline.errors import ConfigError
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.tokenizers import load_tokenizer
from offstage.stages.inference.tokens import encode_text
from offstage.stages.inputs.finetune_options import TEXT


def make_sequences(text: str, model: Mapping[str, Any], *, window: int) -> torch.Tensor:
    """Return ``text`` as token ids (sequences, window), by the tokenizer of the config's ``model``.

    Raises ``ConfigError`` where there is no tokenizer, or where the text is shorter than one sequence.
    """
    tokenizer = load_tokenizer(ModelSource.of(model))
    if tokenizer is None:
        raise ConfigError(f"{TEXT}: the checkpoint has no tokenizer; set model.tokenizer to a folder that has one")
    ids = torch.tensor(encode_text(TEXT, text, tokenizer, instead="a checkpoint that has one"))
    count = len(ids) // window
    if not count:
        raise ConfigError(
            f"{TEXT}: the text has {len(ids)} tokens, and a sequence has {window}; give a longer text, or a smaller "
            "finetune.window"
        )
    return ids[: count * window].view(count, window)


def pick(sequences: torch.Tensor, *, seed: int, begin: int, count: int) -> torch.Tensor:
    """Return ``count`` of the ``sequences`` (count, window): those that a training meets from its ``begin``-th on."""
    places = [divmod(number, len(sequences)) for number in range(begin, begin + count)]
    return sequences[[int(_order(len(sequences), derive(seed, "order", turn))[place]) for turn, place in places]]


def derive(seed: int, *place: int | str) -> int:
    """Return a seed of its own for what stands at ``place``; it follows from ``seed`` and that alone."""
    digest = sha256(":".join(map(str, (seed, *place))).encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


@lru_cache(maxsize=2)  # a step may begin in one round and end in the next
def _order(count: int, seed: int) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
