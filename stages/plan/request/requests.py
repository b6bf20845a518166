"""How much each stage asks of the model at once: what a plan leaves room for beside weights.

A stage that runs the model has a reader here, below itself, by its name: from its own node of the config to a
``Request``. Lengths are rounded up, and to at least 64 tokens, so that a plan isn't made again for every other prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.regular_files import read_object
from offstage.pipeline.stage import Config
from offstage.pipeline.typed_config import read
from offstage.stages.calls.options import ForwardOptions, count_rows, read_texts
from offstage.stages.checkpoints.adapters import adapter_folder
from offstage.stages.checkpoints.generation_defaults import GENERATION_CONFIG
from offstage.stages.checkpoints.hub import checkpoint_folder, tokenizer_folder
from offstage.stages.checkpoints.tokenizer_limits import check_tokenizer
from offstage.stages.checkpoints.tokenizers import tokenizing
from offstage.stages.plan.request.assistant import assistant_bytes
from offstage.stages.plan.request.batch_size import AUTO, batch_sizes
from offstage.stages.plan.request.geometry import LEAST_LENGTH, Request, read_geometry, round_up
from offstage.stages.plan.request.lockstep import (
    KEY as LOCKSTEP,
    LARGEST,
    is_in_lockstep,
    lockstep_is_chosen,
    lockstep_sizes,
)
from offstage.stages.plan.request.media_demand import MediaDemand
from offstage.stages.plan.request.prompts import Prompt, read_prompts
from offstage.stages.plan.request.speculation import GUESSED, LOOKUP, guesses_ahead, is_exact, most_guesses
from offstage.stages.plan.request.texts import ScoredText, ScoreOptions, Tokens, read_scored_texts
from offstage.stages.plan.request.training import FinetuneOptions, Learns

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_DECODING = (
    "num_beams", "num_return_sequences", "max_new_tokens", "max_length", "use_cache", "cache_implementation", LOOKUP,
    GUESSED,
)  # fmt: skip
"""The options of decoding that change what it takes."""

_TEMPLATE_TOKENS = 32
_BYTES_A_TOKEN = 3
"""How many bytes of text make one token where no tokenizer says it: byte-level vocabularies have 3 to 5."""

_LONG = 16
"""Letters for each token of a window: more than tokenizers make one token of, all over a text."""

NORMALISED = 64
"""The positions whose log-softmax ``score`` takes at once. A multiple of four, so that each row lies at the same place
among 16 bytes as if all were taken at once: an accelerator's kernels sum in an order that hangs on it."""

_RESULT_BYTES = 320
"""What a token that is scored takes on the host, as measured: what the tokenizer makes of it, its id, its likelihood,
and both as they are written in the end."""
_FEW_BYTES = 2**20

Reader = Callable[[Mapping[str, Any], Mapping[str, Any]], Request]
"""What a stage asks: from its node of the config, and the node ``model``."""


def read_requests(config: Config) -> dict[int | None, Request]:
    """Return what ``read_request`` does, under null; by each size to choose from where the batch size is
    ``auto``, or the number of batches in lockstep.
    """
    request, node = read_request(config), config.get(asking(config)) or {}
    if request.members > 1 and lockstep_is_chosen(node):
        return {size: replace(request, members=size) for size in lockstep_sizes(request.members)}
    if node.get("batch_size") != AUTO:
        return {None: request}
    sizes = batch_sizes(request.sequences // request.copies)
    return {size: replace(request, sequences=size * request.copies) for size in sizes}


def read_request(config: Config) -> Request:
    """Return what the last of the config's stages that runs the model asks of it; ``generate`` where none is listed.

    Where the batch size is ``auto``, it is that of all prompts together.
    """
    name = asking(config)
    return READERS[name](config.get(name) or {}, config.get("model") or {})


def asking(config: Config) -> str:
    """Return the name of the last of the config's stages that runs the model; ``generate`` where none is listed."""
    return next((name for name in reversed(config.get("stages") or ()) if name in READERS), "generate")


def generate_request(generate: Mapping[str, Any], model: Mapping[str, Any]) -> Request:
    """Return how much the config's ``generate`` asks of ``model``, whose tokenizer counts the tokens of long texts.

    Prompts with media are apart: they are answered one at a time (``media_request``).
    """
    generate = with_checkpoint_defaults(generate, model)
    prompts = [prompt for prompt in _prompts(generate) if not prompt.media] or [Prompt("")]
    alone = 1 if generate.get("exact") or guesses_ahead(generate) else len(prompts)
    together = min(alone, _number(generate, "batch_size", len(prompts) if generate.get("batch_size") == AUTO else 1))
    tokens, apart = max(_tokens(prompt, model) for prompt in prompts), read_geometry(model).has_encoder
    request = _answers(generate, prompts, together=together, tokens=tokens, apart=apart)
    return replace(request, members=_members(generate, -(-len(prompts) // together)), rows=round_up(len(prompts)))


def with_checkpoint_defaults(generate: Mapping[str, Any], model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config's ``generate`` with what the ``generation_config.json`` of ``model`` says beside it.

    It is read as it is, since to have transformers read it takes seconds; what is wrong with it is said where a model
    is built or ``generate`` checked.
    """
    said = read_object(checkpoint_folder(model) / GENERATION_CONFIG)
    defaults = {key: said[key] for key in _DECODING if key in said}
    return {**defaults, **{key: value for key, value in generate.items() if value is not None}}


def _members(generate: Mapping[str, Any], batches: int) -> int:
    """Return how many of so many ``batches`` go together at most."""
    if not is_in_lockstep(generate):
        return 1
    return min(batches, LARGEST if lockstep_is_chosen(generate) else _number(generate, LOCKSTEP, 1))


def media_request(config: Config, demand: MediaDemand) -> Request:
    """Return how much one prompt with media asks at once: that of the longest, beside its encoder's moments."""
    generate = with_checkpoint_defaults(config.get("generate") or {}, config.get("model") or {})
    prompts = [prompt for prompt in _prompts(generate) if prompt.media]
    apart = read_geometry(config.get("model") or {}).has_encoder
    request = _answers(generate, prompts, together=1, tokens=demand.tokens, apart=apart)
    return replace(request, moments=demand.for_copies(request.copies), caches=demand.caches)


def _answers(
    generate: Mapping[str, Any], prompts: Sequence[Prompt], *, together: int, tokens: int, apart: bool
) -> Request:
    """Return what answering so many of ``prompts`` ``together`` asks, the longest of so many ``tokens``; they may be
    ``apart`` from those of the answer, in an encoder.
    """
    asked = [generate, *(prompt.options for prompt in prompts if prompt.options)]
    copies = max(_number(one, key, 1) for one in asked for key in ("num_beams", "num_return_sequences"))
    new = max(_number(one, "max_new_tokens", _number(one, "max_length", 0)) for one in asked)
    told = generate.get("output_logprobs") is True
    keeps = told and any(keeps_logits({**generate, **one}) for one in asked)
    guesses = max(most_guesses(generate, one) for one in asked)
    prompt, both, answer = (round_up(max(LEAST_LENGTH, count)) for count in (tokens, tokens + new, 1 + new))
    length = answer if apart else both
    is_cached = all({**generate, **one}.get("use_cache") is not False for one in asked)
    return Request(
        together * copies,
        prompt if is_cached else both,
        length if is_cached else 0,
        positions=1 + guesses,
        copies=copies,
        judged=guesses if is_exact(generate) else 0,
        kept=round_up(new) if keeps else 0,
        assistant_bytes=assistant_bytes(generate, prompt=prompt, length=both),
        routed=round_up(tokens),
        steps=round_up(max(0, new - 1)),
    )


def forward_request(forward: Mapping[str, Any], model: Mapping[str, Any]) -> Request:
    """Return the tokens of one call of the config's ``forward``, as of one sequence.

    They count only where the rehearsal, which is of that very call, shows nothing.
    """
    given = read(ForwardOptions, forward)
    try:
        texts = read_texts(given).values() if given.texts or given.texts_file else ()
        rows = count_rows(given)
    except ConfigError:
        return Request(length=0)
    longest = max(
        (_tokens(Prompt(text if isinstance(text, str) else " ".join(text)), model) for text in texts), default=1
    )
    rows = min(rows, given.batch_size or rows) or 1
    return Request(1, round_up(max(LEAST_LENGTH, rows * longest)), 0)


def keeps_logits(options: Mapping[str, Any]) -> bool:
    """Return whether log-probabilities can only be had from the logits of all steps, kept until the last.

    Which of the beams' tokens, or of those that one forward judges, are chosen is known later than their logits; of a
    static cache the forward may be compiled, where nothing can be taken from it.
    """
    guesses = guesses_ahead(options) and not is_exact(options)
    return guesses or _number(options, "num_beams", 1) > 1 or options.get("cache_implementation") == "static"


def _number(generate: Mapping[str, Any], key: str, default: int) -> int:
    """Return the count under ``key``; the default too where it is no count, which ``generate`` itself reports."""
    value = generate.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default


def _prompts(generate: Mapping[str, Any]) -> list[Prompt]:
    """Return the prompts, at least one; what is none is reported by ``generate`` itself."""
    try:
        return list(read_prompts(generate).values())
    except ConfigError:
        return [Prompt("")]


def _tokens(prompt: Prompt, model: Mapping[str, Any]) -> int:
    """Return how many tokens ``prompt`` has; of a text with no more bytes than the least length has tokens, at most.

    What a template puts around the messages of a chat is put at so many tokens for each.
    """
    if prompt.token_ids:
        return len(prompt.token_ids)
    return _TEMPLATE_TOKENS * len(prompt.messages or ()) + count_tokens(prompt.text, model)


def count_tokens(text: str, model: Mapping[str, Any]) -> int:
    """Return how many tokens ``text`` has for ``model``, estimated where it is short or there is no tokenizer."""
    size = len(text.encode(errors="replace"))
    tokenizer = _tokenizer(tokenizer_folder(model) or checkpoint_folder(model)) if size > LEAST_LENGTH else None
    with suppress(ConfigError), tokenizing(ConfigError, "model.tokenizer"):  # which the stage itself reports
        if tokenizer is not None:
            return len(tokenizer.encode(text).ids)
    return size // _BYTES_A_TOKEN + 1


@cache
def _tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of ``folder``; null where there is none that loads, which ``generate`` itself reports.

    It needs neither torch nor transformers, so a run that is served from the cache can afford it.
    """
    from tokenizers import Tokenizer

    check_tokenizer(folder)
    try:
        with tokenizing(ConfigError, "model.tokenizer"):
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except ConfigError:
        return None
    tokenizer.no_padding()  # as generate encodes: what the file says of lengths is for training
    tokenizer.no_truncation()
    return tokenizer


def score_request(score: Mapping[str, Any], model: Mapping[str, Any]) -> Request:
    """Return how much the config's ``score`` asks of ``model``: windows whose every position gives logits."""
    options = read(ScoreOptions, score)
    geometry = read_geometry(model)
    window, stride = options.windows(geometry.context)
    try:
        texts = list(read_scored_texts(options).values())
    except ConfigError:
        texts = [ScoredText("")]  # ``score`` itself reports what is none
    parts = [[text.context, text.content] if geometry.has_encoder else [text.whole] for text in texts]
    lengths = [max(_count(part or "", window, model) for part in both) for both in parts]
    windows = sum(1 + max(0, -((window - length) // stride)) for length in lengths)
    most = windows if options.batch_size == AUTO else int(options.batch_size)
    length = round_up(max(LEAST_LENGTH, min(window, max(lengths))))
    sequences = 1 if options.exact else min(windows, most)
    results = sum(lengths) * _RESULT_BYTES
    return Request(
        sequences,
        length,
        length=0,
        positions=length,
        normalised=NORMALISED,
        result_bytes=round_up(results) if results >= _FEW_BYTES else 0,
    )


def _count(tokens: Tokens, window: int, model: Mapping[str, Any]) -> int:
    """Return how many ``tokens`` there are; of a text that is far longer than a ``window``, by its beginning."""
    if not isinstance(tokens, str):
        return len(tokens)
    beginning = tokens[: _LONG * window]
    return count_tokens(beginning, model) * len(tokens) // len(beginning) if beginning else 0


def finetune_request(finetune: Mapping[str, Any], model: Mapping[str, Any]) -> Request:
    """Return how much one forward of the config's ``finetune`` asks of ``model``: all its positions give logits."""
    options = read(FinetuneOptions, finetune)
    window = options.sequence(read_geometry(model).context)
    return Request(options.batch_size, window, length=0, positions=window)


def what_learns(config: Config) -> Learns:
    """Return which of the model's weights the config's stages change; an adapter that is new isn't among them."""
    if asking(config) != "finetune":
        return "nothing"
    if adapter_folder(config["model"]) is not None:
        return "adapter"
    return "all" if read(FinetuneOptions, config["finetune"]).lora is None else "nothing"


def with_adapter(config: Config) -> bool:
    """Return whether the model has an adapter in the run, one that is given or one that it trains."""
    new = asking(config) == "finetune" and read(FinetuneOptions, config["finetune"]).lora is not None
    return new or adapter_folder(config.get("model") or {}) is not None


READERS: Mapping[str, Reader] = {
    "generate": generate_request,
    "score": score_request,
    "forward": forward_request,
    "finetune": finetune_request,
}
"""The stages that run the model, by name."""
