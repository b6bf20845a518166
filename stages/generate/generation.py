"""One generation: prompts in, a ``Generation`` out, measured as it goes, as often as is asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offstage.pipeline.atomic_files import write_text
from offstage.pipeline.stage import Context
from offstage.stages.checkpoints.tokenizers import load_tokenizer
from offstage.stages.dispatch.stage import Dispatched
from offstage.stages.dispatch.transfer.trace import FILE_NAME as TRACE_NAME, Trace
from offstage.stages.generate import prompts
from offstage.stages.generate.assistant import loaded_assistant
from offstage.stages.generate.decoding import Decoding, ShowText
from offstage.stages.generate.inputs import GENERATIONS, GenerateInputs
from offstage.stages.inference.cost import Metrics, expert_uses, run_metrics
from offstage.stages.inference.pass_meter import PassMeter, storage_rate
from offstage.stages.inference.progress import Progress, say_earlier
from offstage.stages.inference.repeats import Outputs, Pass
from offstage.stages.inference.timed_samples import TimedSample
from offstage.stages.inference.tokens import check_words
from offstage.stages.plan import plan as plans

_TOLD = ("prompt", "prompt_tokens", "text", "token_ids", "logprobs", "batch")
"""What the record has of each sequence."""


@dataclass(frozen=True, slots=True)
class Generation:
    """``outputs``: one ``{prompt, text, token_ids, batch}`` a sequence; ``measured``: device → peak bytes.

    Sequences have ``prompt_tokens``, how many their prompt has, unless there are media in it.
    Sequences have ``logprobs`` where these are asked for; those with one number of a ``batch`` were decoded together.
    ``is_chat`` says whether prompts that are text were what a user says in a chat; ``experts`` what a layer's came to;
    ``sample`` how the time went.
    """

    outputs: list[dict[str, Any]]
    is_chat: bool
    metrics: Metrics
    measured: dict[str, int]
    experts: dict[str, dict[str, int]]
    sample: TimedSample
    trace: Trace | None = None

    def save(self, file: Path) -> None:
        """Write ``file``, and ``trace.json`` beside it if there is a trace."""
        data = {
            "outputs": self.outputs,
            "is_chat": self.is_chat,
            "metrics": self.metrics,
            "measured": self.measured,
            "experts": self.experts,
            "sample": self.sample.stored(),
        }
        write_text(file, json.dumps(data, indent=1) + "\n")
        if self.trace is not None:
            self.trace.save(file.with_name(TRACE_NAME))


class GenerationSession:
    """The placed model and what it is asked, made ready to be asked as often as is wanted; ``passes`` counts.

    ``is_chat`` is as in ``Generation``.
    """

    def __init__(self, inputs: GenerateInputs, context: Context) -> None:
        self._inputs, self._context = inputs, context
        self.plan = context.artifact("plan").read(plans.Plan, plans.FILE_NAME)
        self._storage_rate = storage_rate(inputs, self.plan)  # before the weights take the memory that is planned
        self._tokenizer = load_tokenizer(inputs.model)
        encoder = prompts.Encoder.of(inputs.asked, self._tokenizer)
        self._encoded = [
            [] if prompt.media else encoder.encode(name, prompt)
            for name, prompt in zip(inputs.names, inputs.prompts, strict=True)
        ]
        self.is_chat = encoder.is_chat
        self.dispatched: Dispatched = context.live("dispatch")
        check_words(self.dispatched.model, self._encoded, key="generate.prompts")
        self.passes = 0

    @property
    def count(self) -> int:
        """How many prompts there are."""
        return len(self._inputs.prompts)

    @contextmanager
    def decoding(self) -> Iterator[Callable[[], Decoding]]:
        """Yield what makes the decoding of each pass; inside, the assistant is there, if one is asked for."""
        with loaded_assistant(self._inputs.asked.assistant_model, self._context) as assistant:
            free = float(self.plan.forecast.get("forwards_for_free", 0))
            yield lambda: Decoding(self.dispatched, self._inputs, self._tokenizer, assistant, free=free)

    def run(
        self, decoding: Decoding, progress: Progress, *, show: ShowText | None = None, title: str = "generate"
    ) -> TimedSample:
        """Answer every prompt that ``progress`` has no answer to, and return how the time went."""
        is_whole = not progress.done
        meter = PassMeter(self._context, self.dispatched, passes=self.passes)
        decoding.run(self._encoded, progress, show=show, is_chat=self.is_chat, title=title)
        self.passes += 1
        return meter.sample(
            decoding.cost.metrics(self.plan),
            storage_rate=self._storage_rate,
            is_whole=is_whole,
            first_token_seconds=decoding.cost.first_token_seconds,
            token_seconds=decoding.cost.token_seconds,
        )

    @contextmanager
    def repeating(self) -> Iterator[Pass]:
        """Yield what generates all of it again."""
        with self.decoding() as make:

            def generate_again(title: str) -> tuple[TimedSample, Outputs]:
                progress = Progress()
                return self.run(make(), progress, title=title), outputs_of(progress)

            yield generate_again


def outputs_of(progress: Progress) -> list[dict[str, Any]]:
    """Return what the record has of the sequences that are done, in the order of the prompts."""
    return [{name: row[name] for name in _TOLD if name in row} for row in progress.settle()]


def perform(session: GenerationSession, context: Context, folder: Path) -> Generation:
    """Generate what ``session`` is asked, on the live model of the stage dispatch.

    Each batch is kept in ``folder`` as it finishes; those that are there already, of a run that was killed, are taken.
    """
    progress = Progress(folder / GENERATIONS)
    earlier = say_earlier(progress.earlier, session.count, "prompts")
    with session.decoding() as make:
        decoding = make()
        sample = session.run(decoding, progress, show=context.show_text)
    return Generation(
        outputs_of(progress),
        session.is_chat,
        run_metrics(session.dispatched, {**decoding.cost.metrics(session.plan), **earlier}),
        dict(sample.peaks),
        expert_uses(session.dispatched),
        sample,
        session.dispatched.streamer.trace,
    )
