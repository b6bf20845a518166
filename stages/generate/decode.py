"""Decoding: transformers' ``generate`` where the model has it, else a plain loop over its logits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import StoppingCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from offstage.stages.generate.logprobs import ChosenLogprobs
from offstage.stages.generate.prompts import token_ids
from offstage.stages.inference.logits import logits_of
from offstage.stages.inputs.generate_options import LOOKUP
from offstage.stages.plan.request.requests import keeps_logits

END = "eos_token_id"
FILLED = -1
"""What stands in the place of a token after a row was stopped by a string."""


Loop = Callable[..., torch.Tensor]
"""What decodes with all that ``generate`` has made: its ``custom_generate``."""


@dataclass(slots=True)
class Clock:
    """When each token of a batch came, in seconds of ``time.perf_counter``; ``tick`` is told after each.

    Tokens that were guessed and then kept come several at once, in one of so many ``calls``.
    ``first`` is called once the first token is there: what follows is decoding, what came before is the prefill.
    ``see`` gets all new tokens so far, of shape (sequences, tokens), where the model computes; none where they can't
    be told from others.
    """

    tick: Callable[[], object] = lambda: None
    first: Callable[[], object] = lambda: None
    see: Callable[[torch.Tensor], object] = lambda tokens: None
    times: list[float] = field(default_factory=list)
    calls: int = 0
    _seen: int = 0

    def token(self, tokens: torch.Tensor) -> None:
        """Note that a token has come, or several: the last of ``tokens``, all new ones so far."""
        came = max(1, tokens.shape[1] - self._seen) if self.times else 1
        self._seen = tokens.shape[1]
        self.calls += 1
        if not self.times:
            self.first()
        self.times += [time.perf_counter()] * came
        for _ in range(came):
            self.tick()
        self.see(tokens)


class _ClockCriteria(StoppingCriteria):  # type: ignore[misc]
    """Never stops anything: transformers asks its stopping criteria after each token, and so tells the clock."""

    def __init__(self, clock: Clock, skipped: int | None) -> None:
        self._clock, self._skipped = clock, skipped

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._clock.token(input_ids[:, input_ids.shape[1] if self._skipped is None else self._skipped :])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def has_generate(model: nn.Module) -> bool:
    """Return whether transformers' ``generate`` can be called on ``model``."""
    can_generate = getattr(model, "can_generate", None)
    return callable(can_generate) and bool(can_generate()) and callable(getattr(model, "generate", None))


def decode_with_transformers(
    model: Any, inputs: Mapping[str, torch.Tensor], options: Mapping[str, Any], *, device: torch.device, clock: Clock,
    logprobs: ChosenLogprobs | None = None, loop: Loop | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the new tokens, int64 of shape (sequences, new tokens), padded on the right where one ended early.

    What follows a stop string in a row is ``FILLED``, so that it is told from padding that was chosen. ``inputs`` are
    what the model's forward takes, by name; numbers with a fraction are made the model's dtype.
    ``logprobs`` collects those of the tokens. A ``loop`` decodes in the place of transformers' own, and tells them
    itself.
    """
    if loop is not None:
        return _decode_in(loop, model, inputs, options, device=device, clock=clock)
    given = _given(model, inputs, device)
    skipped = _skipped(model, given)
    criteria: list[StoppingCriteria] = [_ClockCriteria(clock, skipped)]
    asked = {**model.generation_config.to_dict(), **options}
    guesses = bool(asked.get("assistant_model") or asked.get(LOOKUP))
    keeps = logprobs is not None and keeps_logits(asked, guesses=guesses)
    watching: AbstractContextManager[object] = nullcontext()
    if logprobs is not None and not keeps:
        criteria.append(logprobs)
        watching = logprobs.watching(model)
    with watching:
        keeping = {"output_logits": True, "return_dict_in_generate": True} if keeps else {}
        output = model.generate(**given, stopping_criteria=StoppingCriteriaList(criteria), **{**options, **keeping})
    sequences: torch.Tensor = getattr(output, "sequences", output).cpu()
    tokens = sequences[:, skipped or 0 :]
    if logprobs is not None and keeps:
        logprobs.note_kept(output, tokens)
    stops = options.get("stop_strings") or model.generation_config.stop_strings
    if not stops or not skipped or options.get("tokenizer") is None:
        return tokens
    return _filled(sequences, skipped, StopStringCriteria(options["tokenizer"], stops))


def _decode_in(
    loop: Loop, model: Any, inputs: Mapping[str, torch.Tensor], options: Mapping[str, Any], *, device: torch.device,
    clock: Clock,
) -> torch.Tensor:  # fmt: skip
    """Return the new tokens that ``loop`` decodes, of one sequence.

    To a loop of another's transformers gives no tokenizer, so that stop strings are made criteria here.
    """
    given, options = _given(model, inputs, device), dict(options)
    skipped = _skipped(model, given)
    criteria: list[StoppingCriteria] = [_ClockCriteria(clock, skipped)]
    tokenizer = options.pop("tokenizer", None)
    if stops := options.get("stop_strings") or model.generation_config.stop_strings:
        criteria.append(StopStringCriteria(tokenizer, stops))
        options["stop_strings"] = None
    output = model.generate(**given, stopping_criteria=StoppingCriteriaList(criteria), custom_generate=loop, **options)
    tokens: torch.Tensor = output.cpu()[:, skipped or 0 :]
    return tokens


def _given(model: Any, inputs: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Return ``inputs`` where the model computes, numbers with a fraction in its dtype."""
    return {
        name: value.to(device, model.dtype if value.is_floating_point() else None) for name, value in inputs.items()
    }


def _filled(sequences: torch.Tensor, skipped: int, stops: StopStringCriteria) -> torch.Tensor:
    """Return the new tokens of ``sequences``, ``FILLED`` after the first of the strings that ``stops`` knows."""
    tokens = sequences[:, skipped:].clone()
    for length in range(1, tokens.shape[1] if len(tokens) > 1 else 0):  # a row alone ends where it is stopped
        tokens[stops(sequences[:, : skipped + length], None), length:] = FILLED
    return tokens


def _skipped(model: Any, given: Mapping[str, torch.Tensor]) -> int | None:
    """Return how many tokens of each sequence aren't new: the prompt, or what the decoder begins with.

    Null for Whisper: it returns new tokens alone, but has others before them while it decodes, and may begin again.
    """
    if isinstance(model, WhisperGenerationMixin):
        return None
    return 1 if model.config.is_encoder_decoder or "input_ids" not in given else given["input_ids"].shape[1]


@torch.no_grad()
def decode_plainly(
    model: nn.Module, input_ids: torch.Tensor, options: Mapping[str, Any], *, clock: Clock,
    logprobs: ChosenLogprobs | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the new tokens, shape (prompts, new tokens), of any ``model`` that maps token ids to logits.

    ``input_ids`` has shape (prompts, length): all of one length, since nothing is known of masks. Each step runs the
    whole sequence, since nothing is known of caches. A row that met an end token repeats it.
    """
    tokens, ended = input_ids, torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    ends = token_ids(END, options.get(END))
    for _ in range(options.get("max_new_tokens", 20)):
        logits = logits_of(model(tokens))[:, -1]
        chosen = choose(logits, tokens, options)
        if ends:
            chosen = torch.where(ended, ends[0], chosen)
            ended |= torch.isin(chosen, torch.tensor(ends, device=chosen.device))
        if logprobs is not None:
            logprobs.note(logits, chosen)
        tokens = torch.cat([tokens, chosen[:, None]], dim=1)
        clock.token(tokens[:, input_ids.shape[1] :])
        if bool(ended.all()):
            break
    return tokens[:, input_ids.shape[1] :].cpu()


def choose(logits: torch.Tensor, tokens: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """Return the next token of each row of ``logits`` (prompts, words): the likeliest, or sampled."""
    if not options.get("do_sample"):
        return logits.argmax(dim=-1)
    logits = logits.float()
    for name, warper in (
        ("temperature", TemperatureLogitsWarper),
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
    ):
        if options.get(name):
            logits = warper(options[name])(tokens, logits)
    return torch.multinomial(logits.softmax(dim=-1), 1)[:, 0]


def trim(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Return ``tokens`` up to the first end token, that one included, without what fills up a row that was stopped."""
    tokens = [token for token in tokens if token != FILLED]
    stop = next((index for index, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return list(tokens[: stop + 1])


def end_tokens(*sources: Any) -> list[int]:
    """Return the end tokens that the first of ``sources`` that has any names as ``eos_token_id``."""
    values = (source.get(END) if isinstance(source, Mapping) else getattr(source, END, None) for source in sources)
    return next((token_ids(END, value) for value in values if value is not None), [])
