"""The keys below ``generate``: those that are ours, typed, and the options of transformers' ``GenerationConfig``.

They are read here, below the stage that decodes by them, since a plan leaves room for what they ask.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeGuard

from offstage.pipeline.errors import Fault
from offstage.pipeline.typed_config import LEAST, key_names, read_open
from offstage.stages.inputs.line_file import is_text
from offstage.stages.inputs.quantized_cache import QuantizedCache, read_cache_config

AUTO = "auto"
EXACT, BATCHED = "exact", "batched"

LOOKUP = "prompt_lookup_num_tokens"
"""The option by which so many tokens at once are guessed from what came before."""
GUESSED = "num_assistant_tokens"
"""The option that says how many tokens an assistant guesses at once."""
GUESSES = 20
"""How many transformers has guessed at once where nothing is said."""

CACHE, OFFLOADED, QUANTIZED = "cache_implementation", "offloaded", "quantized"
"""The option that says which cache there is, its value for one that waits on the host, and for one of fewer bits."""
KEPT_POSITIONS = 64
"""Of a cache on the host memory is taken for so many positions at once."""
_ONE_CACHE = ("static", "offloaded_static")
"""The values of ``cache_implementation`` of which a model has one."""


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """The keys below ``generate`` that are ours; ``conf/generate/greedy.yaml`` says what each means.

    ``options`` are all others that aren't null: those of the ``GenerationConfig``, by their own names.

    Guesses are judged as ``speculation`` says: ``exact`` judges each by the forward that plain decoding would have made
    there, several of them in lockstep over one pass of the weights, so that tokens are those of plain decoding, to the
    bit. ``batched`` is transformers' own way, one forward of all guesses, whose last bits are others.
    """

    prompts: Any = None
    prompts_file: str | None = None
    batch_size: int | Literal["auto"] | None = field(default=None, metadata={LEAST: 1})
    lockstep: int | Literal["auto"] | None = field(default=None, metadata={LEAST: 1})
    chat: bool | Literal["auto"] = "auto"
    system: str | None = None
    exact: bool = False
    output_logprobs: bool = False
    assistant_model: str | None = None
    speculation: Literal["exact", "batched"] = "exact"
    options: Mapping[str, Any] = field(default_factory=dict)

    def over(self, defaults: Mapping[str, Any]) -> GenerateOptions:
        """Return these, with ``defaults`` for the options that aren't given."""
        return replace(self, options={**defaults, **self.options})

    def of_prompt(self, own: Mapping[str, Any]) -> GenerateOptions:
        """Return what decodes a prompt with options of its ``own``, which go before those of all."""
        return replace(self, options={**self.options, **own})

    @property
    def judges_exactly(self) -> bool:
        """Whether guesses are judged by forwards of one token each."""
        return self.speculation == EXACT

    @property
    def guesses_ahead(self) -> bool:
        """Whether tokens are guessed, by an assistant or from the prompt."""
        return bool(self.assistant_model or self.options.get(LOOKUP))

    @property
    def most_guesses(self) -> int:
        """How many tokens are guessed for one pass at most."""
        guessed = count_of(self.options, GUESSED, GUESSES) if self.assistant_model else 0
        return max(guessed, count_of(self.options, LOOKUP, 0))

    @property
    def batches_together(self) -> int | Literal["auto"]:
        """How many batches go through the model in lockstep.

        Where neither that nor how large a batch is was given, prompts are batches of their own, as many together as
        pay: each answer is the one that its prompt has alone, whatever else is asked.
        """
        if self.lockstep is not None:
            return self.lockstep
        alone = self.batch_size is not None or self.guesses_ahead or any(self._apart())
        return 1 if alone else "auto"

    @property
    def keeps_cache_on_host(self) -> bool:
        """Whether keys and values wait on the host."""
        return bool(self.options.get(CACHE) == OFFLOADED)

    @property
    def quantized_cache(self) -> QuantizedCache | None:
        """How keys and values are quantised; null where they aren't."""
        return read_cache_config(self.options) if self.options.get(CACHE) == QUANTIZED else None

    @property
    def lockstep_is_chosen(self) -> bool:
        """Whether how many go together is ours to choose: a model that can't have them so is no fault then."""
        return self.batches_together == AUTO

    def faults(self) -> Iterator[Fault]:
        """Yield what of these doesn't go together, and a system's message that is none."""
        if self.system is not None and not is_text(self.system):
            rule = "give what the system's message says, or null"
            yield Fault("generate.system", f"{self.system!r} is no text; {rule}")
        if self.lockstep not in (None, 1):
            yield from (Fault("generate.lockstep", reason) for reason in self._apart())

    def _apart(self) -> Iterator[str]:
        """Yield why batches can't go in lockstep."""
        if self.batch_size == AUTO and self.lockstep == AUTO:
            yield "batch_size is auto too; give a number for one of them"
        if self.assistant_model and not self.judges_exactly:
            yield (
                "with assistant_model and speculation=batched prompts are answered one at a time; leave one of them out"
            )
        cache = self.options.get(CACHE)
        if cache in _ONE_CACHE:
            yield (
                f"a model has one {cache} cache, and each batch needs one of its own; leave "
                "generate.cache_implementation out"
            )


OWN_KEYS = tuple(name for name in key_names([GenerateOptions]) if name != "options")
"""The keys of ``generate`` that are ours."""


def decoder_start(*, with_media: bool) -> int:
    """Return with how many tokens a decoder beside an encoder begins at most.

    Of a recording these are Whisper's: the start, the language, the task, and whether times are told.
    """
    return 4 if with_media else 1


def read_generate(generate: Mapping[str, Any]) -> GenerateOptions:
    """Return the config node ``generate``; a key that is null has its default."""
    return read_open(GenerateOptions, generate, others="options")


def count_of(options: Mapping[str, Any], name: str, default: int) -> int:
    """Return the count that an option gives; the default too where it is no count, which is told elsewhere."""
    value = options.get(name)
    return value if is_count(value) else default


def is_count(value: object) -> TypeGuard[int]:
    """Return whether ``value`` is a whole number from 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
