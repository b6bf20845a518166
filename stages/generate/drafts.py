"""Guesses of the next tokens, by transformers' own generators of candidates, and how many of them a pass is given.

A guess costs nothing as long as the forward that judges it computes while the pass waits for weights. The plan says how
many do (``free``), what was accepted says how many are worth judging.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator

from offstage.stages.generate.sampling import foreseen_draws

_ALIKE = 1.05
"""Of numbers of guesses that are as good within a twentieth the least is taken."""
_MEMORY = 0.8
"""How much of what was learnt before counts with each pass: texts go over from what repeats to what doesn't."""


class DraftLength:
    """How many tokens are guessed for the next pass, at most ``most``: with as many tokens come soonest.

    A pass takes as long as ``free`` forwards compute, or as its own do where they are more; to guess a token takes
    ``cost`` of a forward. Each guess is taken to stand as often as those before it did.
    """

    def __init__(self, most: int, *, free: float, cost: float = 0.0) -> None:
        self._most, self._free, self._cost = most, free, cost
        self._stood, self._judged = 4.0, 5.0

    def next(self, room: int) -> int:
        """Return how many to guess, where there is room for so many."""
        most = min(self._most, room)
        rates = [self._rate(count) for count in range(most + 1)]
        best = next((count for count, rate in enumerate(rates) if rate * _ALIKE >= max(rates)), 0)
        return min(most, max(best, 1 if self._free >= 2 else 0))

    def _rate(self, count: int) -> float:
        """Return the tokens that come, with so many guesses, in the time that one forward computes."""
        chance = self._stood / self._judged
        tokens = sum(chance**place for place in range(count + 1))
        return tokens / (max(self._free, count + 1) + self._cost * count)

    def learn(self, stood: int, guessed: int) -> None:
        """Hear that so many of the ``guessed`` stood; what came after the first that fell says nothing."""
        self._stood = _MEMORY * self._stood + stood
        self._judged = _MEMORY * self._judged + min(guessed, stood + 1)


class Drafts:
    """What guesses ahead for one sequence: ``assistant`` is the model that does; null: what followed earlier.

    ``config`` is the sequence's ``GenerationConfig``, ``inputs`` what an encoder reads. The processors of the model's
    scores have no say: some keep a state, which a guess would change.
    """

    def __init__(self, input_ids: torch.Tensor, *, assistant: Any, config: Any, inputs: Any) -> None:
        self._generator: Any
        if assistant is None:
            self._generator = PromptLookupCandidateGenerator(
                eos_token_id=config._eos_token_tensor,
                max_matching_ngram_size=config.max_matching_ngram_size or 2,
                max_length=config.max_length,
            )
        else:
            self._generator = AssistedCandidateGenerator(
                input_ids, assistant, generation_config=config, model_kwargs={}, inputs_tensor=inputs
            )

    def guess(self, input_ids: torch.Tensor, count: int) -> list[int]:
        """Return at most ``count`` tokens that may follow ``input_ids``.

        Samples are drawn as the model will draw its own: with the same random numbers, which stay to be drawn.
        """
        if count < 1:
            return []
        self._generator.num_output_tokens = self._generator.num_assistant_tokens = count
        with foreseen_draws():
            candidates, _ = self._generator.get_candidates(input_ids)
        return [int(token) for token in candidates[0, input_ids.shape[1] :][:count]]
