"""Exact speculation: guessed tokens are judged by the very forwards that plain decoding would have made there.

The last token and each guess after it have a forward of their own, of one token, and these go through the model in
lockstep: one pass of its weights serves them all. Each writes its keys and values into the one cache before the next
reads them. So the scores of every position are those of plain decoding, to the bit; what the model takes from them it
takes in order, and with the random numbers of that position. What was guessed wrongly is taken back from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers.utils import ModelOutput

from offstage.stages.calls.results import kept_cache
from offstage.stages.dispatch.streaming.streamer import Streamer, lockstep
from offstage.stages.generate.drafts import DraftLength, Drafts
from offstage.stages.generate.judged import Judged
from offstage.stages.generate.logprobs import ChosenLogprobs
from offstage.stages.generate.shared_cache import strange_layer, take_back, view_of
from offstage.stages.inputs.generate_options import GUESSED, GUESSES, LOOKUP


class ExactSpeculation:
    """The decoding of one sequence with guesses, in the place of transformers' own loop: its ``custom_generate``.

    ``free`` forwards compute while a pass waits for weights. ``assistant`` guesses, at the ``cost`` of so much of a
    forward a token; null: tokens are looked up in what came before. ``logprobs`` collects those of the tokens.
    """

    def __init__(
        self, streamer: Streamer, *, free: float, assistant: Any = None, cost: float = 0.0,
        logprobs: ChosenLogprobs | None = None,
    ) -> None:  # fmt: skip
        self._streamer, self._free = streamer, free
        self._assistant, self._cost, self._logprobs = assistant, cost, logprobs
        self.judged = Judged()

    def decode(
        self, model: Any, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any,
        generation_config: Any, inputs_tensor: Any = None, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``input_ids`` (1, length) and the new tokens after them; ``generate`` calls it with what it has made.

        Raises ``ValueError`` for several sequences, and for a model whose cache can't be taken back.
        """
        if len(input_ids) != 1:
            raise ValueError(f"speculation is of one sequence at a time, and {len(input_ids)} were given")
        drafts = Drafts(input_ids, assistant=self._assistant, config=generation_config, inputs=inputs_tensor)
        length = DraftLength(self._most(generation_config), free=self._free, cost=self._cost)
        chooser = _Chooser(logits_processor, stopping_criteria, generation_config.do_sample, self._logprobs)
        forwards = _Forwards(model, self._streamer, kwargs)
        tokens = chooser.take(input_ids, [forwards.of_prompt(input_ids, generation_config)], [])
        self._note(1, 0)
        with model._optimize_model_for_decode():
            while not chooser.has_ended:
                room = generation_config.max_length - tokens.shape[1] - 1
                guesses = drafts.guess(tokens, length.next(room))
                taken = chooser.take(tokens, forwards.after(tokens, guesses), guesses)
                new = taken[0, tokens.shape[1] :].tolist()
                forwards.keep(len(new))
                accepted = sum(a == b for a, b in zip(new, guesses, strict=False))
                length.learn(accepted, len(guesses))
                self._note(len(new), len(guesses), accepted)
                tokens = taken
        return tokens

    def _most(self, config: Any) -> int:
        """Return how many tokens may be guessed at once."""
        if self._assistant is None:
            return int(getattr(config, LOOKUP))
        return int(getattr(self._assistant.generation_config, GUESSED, None) or GUESSES)

    def _note(self, tokens: int, guessed: int, accepted: int = 0) -> None:
        self.judged.passes += 1
        self.judged.tokens += tokens
        self.judged.guessed += guessed
        self.judged.accepted += accepted


class _Chooser:
    """Takes tokens from scores as transformers does: ``has_ended`` after the one that ends the sequence."""

    def __init__(self, processors: Any, criteria: Any, samples: bool, logprobs: ChosenLogprobs | None) -> None:
        self._processors, self._criteria, self._samples, self._logprobs = processors, criteria, samples, logprobs
        self.has_ended = False

    def take(self, tokens: torch.Tensor, logits: Sequence[torch.Tensor], guesses: Sequence[int]) -> torch.Tensor:
        """Return ``tokens`` (1, length) with those that stand after them.

        ``logits`` (1, words) are those after the last token and after each guess; they say something as long as each
        token is the one that was guessed.
        """
        for row, guess in zip(logits, [*guesses, None], strict=True):
            chosen = self._choose(tokens, row)
            if self._logprobs is not None:
                self._logprobs.note(row, chosen)
            tokens = torch.cat([tokens, chosen[:, None]], dim=-1)
            self.has_ended = bool(self._criteria(tokens, None).all())
            if self.has_ended or int(chosen) != guess:
                break
        return tokens

    def _choose(self, tokens: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self._processors(tokens, row.clone())
        if not self._samples:
            return scores.argmax(dim=-1)
        return torch.multinomial(torch.nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)


class _Forwards:
    """The forwards of one sequence over one cache. ``kwargs`` are what ``generate`` gives the model beside tokens."""

    def __init__(self, model: Any, streamer: Streamer, kwargs: dict[str, Any]) -> None:
        self._model, self._streamer, self._kwargs = model, streamer, kwargs
        self._guessed = 0

    @property
    def _cache(self) -> Any:
        """What the forwards write to and read; null where the model keeps none that transformers hands on."""
        return next(iter(kept_cache(self._kwargs).values()), None)

    def of_prompt(self, input_ids: torch.Tensor, config: Any) -> torch.Tensor:
        """Return the logits (1, words) after the prompt ``input_ids``, in float32 as all of them."""
        outputs = self._model._prefill(input_ids, config, self._kwargs, is_first_iteration=True)
        self._kwargs = self._grown(self._kwargs, outputs)
        strange = strange_layer(self._cache)
        if strange is not None:
            raise ValueError(
                f"{type(self._model).__name__} keeps what it has read as {strange}, of which tokens can't be taken "
                "back; set generate.speculation=batched, or leave speculative decoding out"
            )
        self._cache.activate_past_recording()
        return _last(outputs, input_ids)

    def after(self, tokens: torch.Tensor, guesses: Sequence[int]) -> list[torch.Tensor]:
        """Return the logits after the last of ``tokens`` (1, length), and after each of the ``guesses`` behind it."""
        self._guessed = len(guesses)
        whole = torch.cat([tokens, tokens.new_tensor([list(guesses)], dtype=tokens.dtype)], dim=-1)
        if not guesses:
            return [self._one(whole, self._kwargs)]
        calls, kwargs = [], self._kwargs
        for number in range(len(guesses) + 1):
            views = {
                name: view_of(cache, number, self._streamer.passes.wait_for)
                for name, cache in kept_cache(self._kwargs).items()
            }
            calls.append(partial(self._one, whole[:, : tokens.shape[1] + number], {**kwargs, **views}))
            kwargs = self._grown(kwargs, ModelOutput())
        return lockstep(self._model, calls, size=len(calls))

    def keep(self, new: int) -> None:
        """Keep what the forwards before so many new tokens have left: of the guesses after them nothing."""
        take_back(self._cache, self._guessed + 1 - new)
        for _ in range(new):
            self._kwargs = self._grown(self._kwargs, ModelOutput())

    def _one(self, tokens: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        inputs = self._model.prepare_inputs_for_generation(tokens, next_sequence_length=1, **kwargs)
        return _last(self._model(**inputs, return_dict=True), tokens)

    def _grown(self, kwargs: dict[str, Any], outputs: Any) -> dict[str, Any]:
        """Return ``kwargs`` as they are with one token more."""
        is_encoder_decoder = self._model.config.is_encoder_decoder
        grown: dict[str, Any] = self._model._update_model_kwargs_for_generation(
            outputs, dict(kwargs), is_encoder_decoder=is_encoder_decoder
        )
        return grown


def _last(outputs: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of the last position: no view, since a prompt's forward may give all positions."""
    logits: torch.Tensor = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=tokens.device)
    return logits
