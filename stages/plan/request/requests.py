"""How much each stage asks of the model at once: what a plan leaves room for beside weights.

A stage that runs the model has a reader here, below itself, by its name: from its own node of the config to a
``Request``. Lengths are rounded up, and to at least 64 tokens, so that a plan isn't made again for every other prompt.
The assistant of ``generate.assistant_model``, a second, small checkpoint that guesses tokens ahead, is resident where
the model computes: room is left for all of it, as for the request's own work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offstage.pipeline.errors import ConfigError, foreign
from offstage.pipeline.regular_files import read_object
from offstage.pipeline.stage import Config
from offstage.pipeline.typed_config import read
from offstage.stages.calls.options import ForwardOptions, count_rows, read_texts
from offstage.stages.checkpoints.adapters import adapter_folder
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.generation_defaults import generation_defaults
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.quantization import quantization_of
from offstage.stages.checkpoints.tokenizers import check_tokenizer
from offstage.stages.checkpoints.weight_files import weight_files
from offstage.stages.empty_init.identity import MODEL_KEYS
from offstage.stages.inputs.finetune_options import FinetuneOptions, Learns
from offstage.stages.inputs.generate_options import (
    AUTO,
    GUESSED,
    GUESSES,
    GenerateOptions,
    count_of,
    decoder_start,
    read_generate,
)
from offstage.stages.inputs.prompts import Prompt, read_prompts
from offstage.stages.inputs.texts import ScoredText, ScoreOptions, Tokens, read_scored_texts
from offstage.stages.plan.request.choose import MOST_TOGETHER, batch_sizes, lockstep_sizes
from offstage.stages.plan.request.geometry import LEAST_LENGTH, Request, geometry_of, read_geometry, round_up
from offstage.stages.plan.request.media_demand import MediaDemand
from offstage.stages.units import DTYPE_BYTES

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NEW_TOKENS = 20
"""How many tokens are decoded where nobody says it."""

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


def sized_requests(request: Request, config: Config) -> dict[int | None, Request]:
    """Return ``request``, which ``config`` asks for, under null; by each size to choose from where the batch size is
    ``auto``, or the number of batches in lockstep.
    """
    if request.members > 1 and lockstep_is_chosen(config):
        return {size: replace(request, members=size) for size in lockstep_sizes(request.members)}
    if (config.get(asking(config)) or {}).get("batch_size") != AUTO:
        return {None: request}
    return {size: replace(request, sequences=size * request.copies) for size in batch_sizes(request.prompts)}


def lockstep_is_chosen(config: Config) -> bool:
    """Return whether how many batches go in lockstep is the plan's to choose."""
    return asking(config) == "generate" and read_generate(config.get("generate") or {}).lockstep_is_chosen


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
    given = effective_options(generate, model)
    prompts = [prompt for prompt in _prompts(given) if not prompt.media] or [Prompt("")]
    size = len(prompts) if given.batch_size == "auto" else given.batch_size or 1
    together = 1 if given.exact or given.guesses_ahead else min(len(prompts), size)
    request = _answers(given, prompts, together=together, model=model)
    batches, asked = -(-len(prompts) // together), given.batches_together
    members = min(batches, MOST_TOGETHER if asked == "auto" else asked)
    return replace(request, members=members, rows=round_up(len(prompts)))


def effective_options(generate: Mapping[str, Any], model: Mapping[str, Any]) -> GenerateOptions:
    """Return the options that decoding goes by: those of the config's ``generate`` over the checkpoint's own.

    How many tokens an assistant guesses is its own to say before it is the checkpoint's.
    """
    given = read_generate(generate)
    defaults = generation_defaults(ModelSource.of(model).folder)
    return given.over(defaults | assistant_defaults(given.assistant_model) if given.assistant_model else defaults)


def media_request(config: Config, demand: MediaDemand) -> Request:
    """Return how much one prompt with media asks at once: that of the longest, beside its encoder's moments."""
    model = config.get("model") or {}
    given = effective_options(config.get("generate") or {}, model)
    prompts = [prompt for prompt in _prompts(given) if prompt.media]
    request = _answers(given, prompts, together=1, model=model, tokens=demand.tokens)
    return replace(request, moments=demand.for_copies(request.copies), caches=demand.caches)


def _answers(
    given: GenerateOptions,
    prompts: Sequence[Prompt],
    *,
    together: int,
    model: Mapping[str, Any],
    tokens: int | None = None,
) -> Request:
    """Return what answering so many of ``prompts`` ``together`` asks, the longest of so many ``tokens``.

    Each prompt is answered by its own options over those of all.
    """
    begun = decoder_start(with_media=tokens is not None)
    if tokens is None:
        tokens = max(_tokens(prompt, model) for prompt in prompts)
    asked = [given.of_prompt(prompt.options) for prompt in prompts]
    copies = max(_copies(one.options) for one in asked)
    has_encoder = bool(read_object(ModelSource.of(model).folder / "config.json").get("is_encoder_decoder"))
    new = max(_new_tokens(one.options, 0 if has_encoder else tokens) for one in asked)
    keeps = given.output_logprobs and any(
        keeps_logits(one.options, guesses=one.guesses_ahead and not one.judges_exactly) for one in asked
    )
    guesses = max(one.most_guesses for one in asked)
    prompt, both, answer = (round_up(max(LEAST_LENGTH, count)) for count in (tokens, tokens + new, begun + new))
    length = answer if has_encoder else both  # the prompt's positions are then the encoder's
    is_cached = all(one.options.get("use_cache") is not False for one in asked)
    bits = asked[0].quantized_cache
    chunked = any(one.options.get("prefill_chunk_size") for one in asked)
    decoded = new - 1 + (tokens if chunked else 0)  # what a prompt's later chunks bring is kept as if it were decoded
    second = assistant_bytes(given.assistant_model, prompt=prompt, length=both)
    return Request(
        together * copies,
        prompt if is_cached else both,
        length if is_cached else 0,
        positions=1 + guesses,
        copies=copies,
        forwards=max(_forwards(one.options) for one in asked),
        judged=guesses if given.judges_exactly else 0,
        kept=round_up(new) if keeps else 0,
        assistant_bytes=sum(second),
        assistant_cache=second[1],
        cache_on_host=all(one.keeps_cache_on_host for one in asked),
        cache_bits=bits,
        decoded=max(0, decoded) if bits else 0,
        routed=round_up(tokens),
        steps=round_up(max(0, new - 1)),
    )


def _copies(options: Mapping[str, Any]) -> int:
    """Return how many sequences each prompt is."""
    return max(count_of(options, "num_beams", 1), count_of(options, "num_return_sequences", 1))


def _forwards(options: Mapping[str, Any]) -> int:
    """Return how many forwards a token takes: guidance has one beside the prompt's, over a cache of its own."""
    return 2 if options.get("guidance_scale") not in (None, 1) else 1


def _new_tokens(options: Mapping[str, Any], prompt: int) -> int:
    """Return how many tokens are decoded at most, where so many of a ``prompt`` count as decoded too."""
    longest = count_of(options, "max_length", 0)
    return count_of(options, "max_new_tokens", max(0, longest - prompt) if longest else _NEW_TOKENS)


def assistant_node(path: str | None) -> dict[str, Any] | None:
    """Return the assistant in the folder ``path`` as a node ``model`` says it; null where there is none."""
    return {**MODEL_KEYS, "path": path} if path else None


def assistant_defaults(path: str | None) -> dict[str, Any]:
    """Return how many tokens the assistant in the folder ``path`` guesses at once where nothing is given, if it says.

    That is the assistant's own to say: what the model's files have of it isn't asked.
    """
    node = assistant_node(path)
    defaults = generation_defaults(ModelSource.of(node).folder) if node else {}
    return {GUESSED: defaults.get(GUESSED)}


def assistant_bytes(path: str | None, *, prompt: int, length: int) -> tuple[int, int]:
    """Return what the assistant takes for a sequence of ``length`` tokens in the end, ``prompt`` of them at once.

    That is its weights, in the dtype in which they rest or are unpacked to, and the widest moment of a layer; then its
    keys and values. A folder without weights takes nothing here: the stage itself refuses it.
    """
    node = assistant_node(path)
    if node is None:
        return 0, 0
    folder = ModelSource.of(node).folder
    weights = assistant_weights(folder)
    config = read_object(folder / "config.json")
    geometry = geometry_of(config)
    width = int(DTYPE_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 4))
    cache = (geometry.layers + 1) * geometry.cached * length * width
    rows = max(prompt, GUESSES) * (6 * geometry.hidden + 2 * geometry.intermediate) * width
    moment = max(rows, 2 * length * geometry.hidden * width) + geometry.vocabulary * (width + 4 * 4)
    return weights + moment, cache


def assistant_weights(folder: Path) -> int:
    """Return the bytes of the weights in ``folder`` in use: those at rest, unless they are quantised."""
    if quantization_of(folder) is None:
        return sum(file.stat().st_size for file in weight_files(folder))
    from offstage.stages.checkpoints.packed import in_dtype
    from offstage.stages.checkpoints.readers import open_reader

    dtype = str(read_object(folder / "config.json").get("dtype"))
    return sum((in_dtype(rest, dtype) or rest).bytes for rest in open_reader(open_checkpoint(folder)).entries.values())


def forward_request(forward: Mapping[str, Any], model: Mapping[str, Any]) -> Request:
    """Return the tokens of one call of the config's ``forward``, as of one sequence.

    They count only where the rehearsal, which is of that very call, shows nothing.
    """
    given = read(ForwardOptions, forward)
    try:
        texts = read_texts(given).values()
        rows = count_rows(given)
    except ConfigError:
        return Request(length=0)
    longest = max(
        (_tokens(Prompt(text if isinstance(text, str) else " ".join(text)), model) for text in texts), default=1
    )
    rows = min(rows, given.batch_size or rows) or 1
    return Request(1, round_up(max(LEAST_LENGTH, rows * longest)), 0)


def keeps_logits(options: Mapping[str, Any], *, guesses: bool) -> bool:
    """Return whether log-probabilities can only be had from the logits of all steps, kept until the last.

    Which of the beams' tokens, or of those that one forward judges (``guesses``), are chosen is known later than their
    logits; of a static cache the forward may be compiled, where nothing can be taken from it.
    """
    return guesses or count_of(options, "num_beams", 1) > 1 or options.get("cache_implementation") == "static"


def _prompts(given: GenerateOptions) -> list[Prompt]:
    """Return the prompts, at least one; what is none is reported by ``generate`` itself."""
    try:
        return list(read_prompts(given).values())
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
    tokenizer = _tokenizer(ModelSource.of(model).text_folder) if size > LEAST_LENGTH else None
    with suppress(ConfigError), foreign(ConfigError, "model.tokenizer"):  # which the stage itself reports
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
        with foreign(ConfigError, "model.tokenizer"):
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
