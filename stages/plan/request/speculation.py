"""Tokens that are guessed ahead, and how the model judges them.

``exact`` judges each guess by the forward that plain decoding would have made there, several of them in lockstep over
one pass of the weights: tokens are those of plain decoding, to the bit. ``batched`` is transformers' own way, one
forward of all guesses, whose last bits are others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from offstage.pipeline.errors import Fault
from offstage.stages.plan.request.assistant import GUESSES, KEY as ASSISTANT

KEY = "speculation"
LOOKUP = "prompt_lookup_num_tokens"
GUESSED = "num_assistant_tokens"
EXACT, BATCHED = "exact", "batched"


def is_exact(generate: Mapping[str, Any]) -> bool:
    """Return whether guesses of the config node ``generate`` are judged by forwards of one token each."""
    return generate.get(KEY) in (None, EXACT)


def guesses_ahead(options: Mapping[str, Any]) -> bool:
    """Return whether ``options`` have tokens guessed, by an assistant or from the prompt."""
    return bool(options.get(ASSISTANT) or options.get(LOOKUP))


def most_guesses(generate: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> int:
    """Return how many tokens are guessed for one pass at most; ``own`` are options of one prompt."""
    options = {**generate, **(own or {})}
    guessed = options.get(GUESSED) or GUESSES if generate.get(ASSISTANT) else 0
    return max((count for count in (guessed, options.get(LOOKUP)) if type(count) is int), default=0)


def check_speculation(generate: Mapping[str, Any]) -> Iterable[Fault]:
    """Yield what is wrong with the key in the config node ``generate``, or doesn't go together with it."""
    mode = generate.get(KEY)
    if mode not in (None, EXACT, BATCHED):
        yield Fault(f"generate.{KEY}", f"{mode!r} is neither {EXACT} nor {BATCHED}")
