"""The decoding of one generation: prompts as batches, each through the model, timed as its tokens come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from offstage.pipeline.errors import ConfigError, foreign
from offstage.pipeline.peers import peers
from offstage.stages.checkpoints.generation_defaults import read_generation_config
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.dispatch.stage import Dispatched
from offstage.stages.dispatch.streaming.module_state import LockstepError
from offstage.stages.dispatch.transfer.traffic import Traffic
from offstage.stages.generate import decode, options, prompts
from offstage.stages.generate.assistant import Assistant
from offstage.stages.generate.batches import Asked, make_batches
from offstage.stages.generate.host_cache import HostRoom, host_cache
from offstage.stages.generate.inputs import GenerateInputs
from offstage.stages.generate.judged import Judged
from offstage.stages.generate.logprobs import ChosenLogprobs
from offstage.stages.generate.metrics import Cost, TimedBatch
from offstage.stages.generate.quantized_cache import unpack_by_operators
from offstage.stages.generate.sampling import SeededRows, seeded_rows
from offstage.stages.generate.speculation import ExactSpeculation
from offstage.stages.generate.transcript import LiveTranscript, before_answer, decode_after
from offstage.stages.inference.padding import make_batch
from offstage.stages.inference.progress import Progress, Row
from offstage.stages.inference.tokens import check_words
from offstage.stages.inputs.generate_options import CACHE, LOOKUP, OFFLOADED, QUANTIZED, decoder_start
from offstage.stages.inputs.prompt_processor import PromptProcessor
from offstage.stages.inputs.prompts import MOST, prompt_inputs
from offstage.stages.inputs.quantized_cache import CACHE_CONFIG, read_cache_config

_log = logging.getLogger("offstage")

ShowText = Callable[[str], object]
_PAD = "pad_token_id"
_SEVERAL = ("num_beams", "num_return_sequences")
"""The options that have several sequences decoded for one prompt."""


class Decoding:
    """Runs the batches of one generation and sums up what they cost.

    The plan says that so many forwards are ``free`` while a pass waits for weights.
    """

    def __init__(
        self,
        dispatched: Dispatched,
        inputs: GenerateInputs,
        tokenizer: Any,
        assistant: Assistant | None,
        *,
        free: float,
    ) -> None:
        self._dispatched, self._inputs, self._tokenizer = dispatched, inputs, tokenizer
        self._assistant, self._free = assistant, free
        self.cost = Cost()
        self._defaults = read_generation_config(ModelSource.of(inputs.model).folder)
        self._uses_transformers = decode.has_generate(dispatched.model)
        config = getattr(dispatched.model, "config", None)
        self._side = "right" if getattr(config, "is_encoder_decoder", False) else "left"

    def run(
        self, encoded: Sequence[Sequence[int]], progress: Progress, *, show: ShowText | None = None,
        is_chat: bool = False, title: str = "generate",
    ) -> None:  # fmt: skip
        """Answer every prompt, in batches, those apart that ``progress`` has.

        The answer to a single prompt is given to ``show`` while it comes; ``is_chat`` as in ``Generation``; ``title``
        stands before the bar.
        """
        given, members = self._inputs.asked, int(self._inputs.asked.lockstep or 1)
        batches = make_batches(
            [self._asked(index, ids) for index, ids in enumerate(encoded)],
            size=int(given.batch_size or 1),
            alone=given.exact or self._assistant is not None,
            padded=self._uses_transformers,
        )
        left = {number: batch for number, batch in enumerate(batches) if number not in progress.done}
        steps = sum(batch[0].options.get("max_new_tokens") or 0 for batch in left.values())
        live = self._live(batches[0][0], show, is_chat=is_chat) if show and len(encoded) == 1 else None
        samples = any(batch[0].options.get("do_sample", True) for batch in left.values())
        with (
            tqdm(total=steps or None, desc=title, unit="token", disable=None, leave=False) as bar,
            SeededRows(self._dispatched.model) if samples else nullcontext(),
        ):

            def answer(number: int) -> list[TimedBatch]:
                if len(batches) > 1:
                    bar.set_postfix_str(f"{len(progress.done)} of {len(batches)} batches")
                rows, spans = self._run_batch(left[number], bar, live)
                progress.add(self._rows(number, left[number], rows))
                if live:
                    live.finish(progress.done[number][0]["text"])
                return spans

            together = [number for number, batch in left.items() if members > 1 and not batch[0].with_media]
            for number in sorted(left.keys() - together):
                self._answer_alone(partial(answer, number))
            reason = self._answer_together([partial(answer, number) for number in together], members)
            if self._dispatched.streamer.passes.borders is not None and together:
                reason = _agreed(reason, progress)
            if reason is None:
                return
            again = [number for number in together if number not in progress.done]
            _log.warning("%d batches begin again and go one after another: %s", len(again), reason)
            self.cost.begun_again = len(again)
            for number in again:
                self._answer_alone(partial(answer, number))

    def _guesses(self, given: Mapping[str, Any]) -> bool:
        """Return whether tokens are guessed under the options ``given``, or under the model's defaults."""
        return self._assistant is not None or bool(given.get(LOOKUP, self._default(LOOKUP)))

    def _default(self, option: str) -> Any:
        return getattr(getattr(self._dispatched.model, "generation_config", None), option, None)

    def _answer_alone(self, answer: Callable[[], list[TimedBatch]]) -> None:
        """Have ``answer`` made by itself, and count what it costs."""
        with self._dispatched.streamer.passes.alone():
            self.cost.add(*answer())

    def _answer_together(self, answers: Sequence[Callable[[], list[TimedBatch]]], size: int) -> str | None:
        """Have ``answers`` made in lockstep, so many at a time, and count what they cost together.

        Return why not all of them could be made so; null where they were.
        """
        spans: list[TimedBatch] = []

        def make(answer: Callable[[], list[TimedBatch]]) -> None:
            spans.extend(answer())

        try:
            group = self._dispatched.streamer.passes.go_together(
                [partial(make, answer) for answer in answers], size=size
            )
        except LockstepError as error:  # those that have their answer keep it
            self.cost.add(*spans)
            return error.reason
        self.cost.add(*spans, passes=group.passes)
        return None

    def _live(self, asked: Asked, show: ShowText, *, is_chat: bool) -> LiveTranscript | None:
        """Return what shows the answer while it comes; null where it is chosen from several, or there is no text."""
        several = (asked.options.get(name, self._default(name)) or 1 for name in _SEVERAL)
        if self._tokenizer is None or max(several) > 1:
            return None
        prompt = before_answer(self._inputs.prompts[asked.index].recorded, is_chat=is_chat)
        return LiveTranscript(show, prompt, self._tokenizer, before=self._before(asked))

    def _asked(self, index: int, ids: Sequence[int]) -> Asked:
        """Return prompt ``index`` with the options that it is answered with: its own, then those of all."""
        own = {**self._inputs.asked.options, **self._inputs.prompts[index].options}
        seed = own.pop("seed", (self._inputs.seed + index) % MOST)
        if not self._uses_transformers:
            own = options.plain_options(own, self._defaults)
        return Asked(index, ids, seed, own, with_media=bool(self._inputs.prompts[index].media))

    def _rows(self, number: int, batch: Sequence[Asked], answers: Sequence[Row]) -> list[Row]:
        """Return what is told of each sequence of the batch: a prompt may have several, one after another."""
        copies = max(1, len(answers) // len(batch))
        return [
            {
                "index": asked.index,
                "batch": number,
                "rows": len(answers),
                "prompt": self._inputs.prompts[asked.index].recorded,
                **({} if asked.with_media else {"prompt_tokens": len(asked.ids)}),
                "text": self._text(asked, answer["token_ids"]),
                **answer,
            }
            for asked, answer in ((batch[place // copies], answer) for place, answer in enumerate(answers))
        ]

    def _text(self, asked: Asked, row: Sequence[int]) -> str | None:
        """Return the text of the new tokens ``row``, as it goes on after that of the prompt where it does.

        Null without a tokenizer.
        """
        if self._tokenizer is None:
            return None

        def decode_ids(ids: Sequence[int]) -> str:
            return str(self._tokenizer.decode(ids, skip_special_tokens=True))

        with foreign(ConfigError, f"model.tokenizer: the tokenizer can't make text of {row!r}"):
            return decode_after(decode_ids, self._before(asked), row)

    def _before(self, asked: Asked) -> Sequence[int]:
        """Return the token ids that the answer goes on after: none where an encoder has read them."""
        return () if self._side == "right" else asked.ids

    def _run_batch(
        self, batch: Sequence[Asked], bar: Any, live: LiveTranscript | None
    ) -> tuple[list[Row], list[TimedBatch]]:
        """Return the new tokens of each sequence, with their log-probabilities where they are asked for, and when they
        came, if any did.
        """
        given, traffic = batch[0].options, self._dispatched.streamer.traffic
        ends = decode.end_tokens(given, self._defaults, getattr(self._dispatched.model, "generation_config", None))
        asked = self._tensors(batch, pad=self._pad(given, ends))
        logprobs = ChosenLogprobs() if self._inputs.asked.output_logprobs else None
        marks: list[tuple[Traffic, float]] = []
        clock = decode.Clock(
            tick=bar.update,
            first=lambda: marks.append((traffic.copy(), time.process_time())),  # the traffic goes on counting
        )
        if live:
            clock.tick, clock.see = bar.close, live.more  # the text takes the bar's place
        speculation = self._speculation(given, logprobs)
        torch.manual_seed(batch[0].seed)
        began = time.perf_counter()
        with seeded_rows([one.seed for one in batch]):
            tokens = self._decode(asked, given, clock, logprobs, speculation)
        ended, judged = (traffic.copy(), time.process_time()), self._judged(given, speculation, clock)
        spans = [
            TimedBatch(began, clock.times, len(tokens), first, ended[0], cpu=(cpu, ended[1]), judged=judged)
            for first, cpu in marks[:1]
        ]
        answers = [decode.trim([int(token) for token in row], ends) for row in tokens]
        rows: list[Row] = [
            {
                "token_ids": ids,
                "finish_reason": "stop" if self._is_stopped(ids, given, ends, asked) else "length",
                **({"logprobs": logprobs.of(place, len(ids))} if logprobs else {}),
            }
            for place, ids in enumerate(answers)
        ]
        return rows, spans

    def _is_stopped(
        self, ids: Sequence[int], given: Mapping[str, Any], ends: Sequence[int], asked: Mapping[str, torch.Tensor]
    ) -> bool:
        """Return whether the new tokens ``ids`` came to an end of their own: an end token, a stop string, or whatever
        ended them before as many were there as may be.
        """
        if ids and ids[-1] in ends:
            return True
        most = given.get("max_new_tokens", self._default("max_new_tokens"))
        longest = given.get("max_length", self._default("max_length"))
        if most is None and longest is not None:
            most = longest - (asked["input_ids"].shape[1] if self._side == "left" and "input_ids" in asked else 1)
        stops = given.get("stop_strings") or getattr(self._defaults, "stop_strings", None) or ()
        text = self._tokenizer.decode(ids) if stops and self._tokenizer is not None else ""
        strings = [stops] if isinstance(stops, str) else stops
        return (most is not None and len(ids) < most) or any(stop in text for stop in strings)

    def _tensors(self, batch: Sequence[Asked], *, pad: int) -> Mapping[str, torch.Tensor]:
        """Return what the model is given for ``batch``, by name: of a prompt with media what its processor makes."""
        if not batch[0].with_media:
            padded = make_batch([one.ids for one in batch], pad=pad, side=self._side)
            return {"input_ids": padded.input_ids, "attention_mask": padded.attention_mask}
        index = batch[0].index
        name, prompt = self._inputs.names[index], self._inputs.prompts[index]
        prompt_tensors = prompt_inputs(name, prompt, self._processor, self._inputs.asked)
        check_words(self._dispatched.model, [prompt_tensors.ids], key=name)
        return prompt_tensors.tensors

    @cached_property
    def _processor(self) -> PromptProcessor:
        return PromptProcessor(ModelSource.of(self._inputs.model), key="generate")

    def _pad(self, given: Mapping[str, Any], ends: Sequence[int]) -> int:
        pads = (given.get(_PAD), *(getattr(source, _PAD, None) for source in (self._defaults, self._tokenizer)))
        return [*(token for pad in pads for token in prompts.token_ids(_PAD, pad)), *ends, 0][0]

    def _speculation(self, given: Mapping[str, Any], logprobs: ChosenLogprobs | None) -> ExactSpeculation | None:
        """Return what guesses and judges under the options ``given``; null where transformers does, or nothing does."""
        if not (self._uses_transformers and self._inputs.asked.judges_exactly and self._guesses(given)):
            return None
        assistant = self._assistant.for_prompt(given) if self._assistant is not None else None
        cost = _bytes(assistant) / max(1, _bytes(self._dispatched.model)) if assistant is not None else 0.0
        streamer = self._dispatched.streamer
        return ExactSpeculation(streamer, free=self._free, assistant=assistant, cost=cost, logprobs=logprobs)

    def _judged(
        self, given: Mapping[str, Any], speculation: ExactSpeculation | None, clock: decode.Clock
    ) -> Judged | None:
        """Return what came of guessing, null without guesses; of what transformers itself judged, how many passes."""
        if speculation is not None:
            return speculation.judged
        guesses = self._uses_transformers and self._guesses(given)
        return Judged(passes=clock.calls, tokens=len(clock.times), is_exact=False) if guesses else None

    def _decode(
        self, asked: Mapping[str, torch.Tensor], given: Mapping[str, Any], clock: decode.Clock,
        logprobs: ChosenLogprobs | None, speculation: ExactSpeculation | None,
    ) -> torch.Tensor:  # fmt: skip
        model, device = self._dispatched.model, self._dispatched.device
        if not self._uses_transformers:
            about = f"generate: {type(model).__name__} has no generate() of transformers, and fails on token ids alone"
            with foreign(ConfigError, about, advice="; stages=forward calls any model with inputs of its own"):
                return decode.decode_plainly(
                    model, asked["input_ids"].to(device), given, clock=clock, logprobs=logprobs
                )
        stops = given.get("stop_strings") or getattr(self._defaults, "stop_strings", None)
        call = {**given, "tokenizer": self._tokenizer} if stops else dict(given)
        if self._assistant is not None and speculation is None:
            call["assistant_model"] = self._assistant.for_prompt(given)
        if call.get(CACHE, self._default(CACHE)) == QUANTIZED:
            self._quantise_cache(call)
        loop = speculation.decode if speculation is not None else None
        with (
            torch.no_grad(),
            foreign(ConfigError, "generate: transformers' generate fails with these options"),
            self._host_cache(call, asked) as cache,
        ):
            return decode.decode_with_transformers(
                model, asked, call | cache, device=device, clock=clock, logprobs=logprobs, loop=loop
            )

    def _quantise_cache(self, call: dict[str, Any]) -> None:
        """Prepare ``call`` for a quantised cache: transformers changes the options of one that it is given."""
        config = call.get(CACHE_CONFIG, self._default(CACHE_CONFIG))
        if config is not None:
            call[CACHE_CONFIG] = dict(config)
        if read_cache_config({CACHE_CONFIG: config}).backend == "quanto":
            unpack_by_operators()

    def _host_cache(
        self, call: dict[str, Any], asked: Mapping[str, torch.Tensor]
    ) -> AbstractContextManager[dict[str, Any]]:
        """Return a context of what ``call`` is given for a cache on the host, in place of the option that transformers
        has for that; of nothing where it asks for none.

        Where the host computes all, the cache is there already.
        """
        if call.get(CACHE, self._default(CACHE)) != OFFLOADED:
            return nullcontext({})
        call.pop(CACHE, None)
        if (own := getattr(self._dispatched.model, "generation_config", None)) is not None:
            own.cache_implementation = None
        streamer = self._dispatched.streamer
        model: Any = self._dispatched.model
        if not streamer.is_apart:
            return nullcontext({})
        begun = decoder_start(with_media="input_ids" not in asked)
        before = begun if model.config.is_encoder_decoder else asked["input_ids"].shape[1]
        new = call.get("max_new_tokens") or max(0, (call.get("max_length") or 0) - before)
        return host_cache(model, HostRoom(before + new, streamer.pinned, streamer.link_to))


def _agreed(reason: str | None, progress: Progress) -> str | None:
    """Return why batches begin again on all hosts of the run, null where they don't on any.

    Then all have the same ones left: those that all have are kept.
    """
    answers = peers().exchange([reason, sorted(progress.done)])
    first_reason = next((one for one, _ in answers if one is not None), None)
    if first_reason is not None:
        progress.keep(set.intersection(*(set(done) for _, done in answers)))
    return first_reason


def _bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
