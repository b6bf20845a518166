"""One generation: prompts in, texts out, measured as it goes, as often as is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from offstage.pipeline.stage import Context
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.tokenizers import load_tokenizer
from offstage.stages.generate import prompts
from offstage.stages.generate.assistant import Assistant, loaded_assistant
from offstage.stages.generate.decoding import Decoding
from offstage.stages.generate.inputs import GENERATIONS, GenerateInputs
from offstage.stages.inference.progress import Progress
from offstage.stages.inference.session import Answering, ModelSession, PassResult
from offstage.stages.inference.tokens import check_words

_TOLD = ("prompt", "prompt_tokens", "text", "token_ids", "logprobs", "batch")
"""What the record has of each sequence."""


class GenerationSession(ModelSession[GenerateInputs]):
    """The placed model and its prompts. It has an output ``{prompt, text, token_ids, batch}`` for each sequence.

    Sequences have ``prompt_tokens``, how many their prompt has, unless there are media in it, and ``logprobs`` where
    these are asked for; those with one number of a ``batch`` were decoded together. ``encoded`` are the token ids of
    the prompts, none of one with media. ``is_chat`` says whether prompts that are text are what a user says in a chat.
    """

    task, units, results_file = "generate", "prompts", GENERATIONS

    def __init__(self, inputs: GenerateInputs, context: Context) -> None:
        super().__init__(inputs, context)
        self._tokenizer = load_tokenizer(ModelSource.of(inputs.model))
        encoder = prompts.Encoder.of(inputs.asked, self._tokenizer)
        self.encoded = [
            [] if prompt.media else encoder.encode(name, prompt)
            for name, prompt in zip(inputs.names, inputs.prompts, strict=True)
        ]
        self.is_chat = encoder.is_chat
        check_words(self.dispatched.model, self.encoded, key="generate.prompts")

    @property
    def count(self) -> int:
        """How many prompts there are."""
        return len(self.inputs.prompts)

    @contextmanager
    def answering(self) -> Iterator[Answering]:
        """Yield what generates; the assistant is there inside, if one is asked for."""
        with loaded_assistant(self.inputs.asked.assistant_model, self.context) as assistant:
            yield lambda progress, title: self.answer(progress, title, assistant)

    def answer(self, progress: Progress, title: str, assistant: Assistant | None = None) -> PassResult:
        """Answer every prompt that ``progress`` has no answer to; what is kept as it comes is shown as it comes."""
        free = float(self.plan.forecast.get("forwards_for_free", 0))
        decoding = Decoding(self.dispatched, self.inputs, self._tokenizer, assistant, free=free)
        show = self.context.show_text if progress.is_kept else None
        decoding.run(self.encoded, progress, show=show, is_chat=self.is_chat, title=title)
        outputs: list[dict[str, Any]] = [
            {name: row[name] for name in _TOLD if name in row} for row in progress.settle()
        ]
        return PassResult(
            outputs=outputs,
            metrics=decoding.cost.metrics(self.plan),
            content={"outputs": outputs, "is_chat": self.is_chat},
            first_token_seconds=decoding.cost.first_token_seconds,
            token_seconds=decoding.cost.token_seconds,
        )
