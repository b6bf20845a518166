"""What a request takes beside weights: the shape of the model, read from its ``config.json``, and that of the request.

Sizes are upper bounds that don't need the model's code. Lengths are rounded up, and to at least 64 tokens, so that a
plan isn't made again for every other prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError
from pipeline.regular_files import read_object
from stages.checkpoints.hub import checkpoint_folder, tokenizer_folder
from stages.checkpoints.tokenizer_limits import check_tokenizer
from stages.checkpoints.tokenizers import tokenizing
from stages.plan.prompts import Prompt, read_prompts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LEAST_LENGTH = 64
_TEMPLATE_TOKENS = 32
_BYTES_A_TOKEN = 3
"""How many bytes of text make one token where no tokenizer says it: byte-level vocabularies have 3 to 5."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a decoder: ``cached`` is the elements of keys and values a layer keeps for a token.

    ``context`` is how many tokens it has positions for, 0 where its config doesn't say, and for an encoder-decoder.
    """

    layers: int = 0
    cached: int = 0
    hidden: int = 0
    intermediate: int = 0
    vocabulary: int = 0
    context: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """How much is asked for at once: ``sequences``, the tokens of the longest ``prompt``, its ``length`` in the end."""

    sequences: int = 1
    prompt: int = _LEAST_LENGTH
    length: int = _LEAST_LENGTH

    @property
    def tokens(self) -> int:
        """The tokens that all sequences have together in the end."""
        return self.sequences * self.length


def read_geometry(model: Mapping[str, Any]) -> Geometry:
    """Return the shape that the ``config.json`` of the config's ``model`` states; nothing where there is none."""
    return geometry_of(read_object(checkpoint_folder(model) / "config.json"))


def geometry_of(config: Mapping[str, Any]) -> Geometry:
    """Return the shape that ``config``, the content of a ``config.json``, states."""
    two_halves = bool(config.get("is_encoder_decoder"))
    config = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config
    heads = _first(config, "num_attention_heads", "n_head", "num_heads", "n_heads")
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    head = _first(config, "head_dim", "d_kv") or (hidden // heads if heads else 0)
    key_value_heads = _first(config, "num_key_value_heads", "num_kv_heads") or heads
    return Geometry(
        layers=_first(config, "num_hidden_layers", "n_layer", "num_decoder_layers", "num_layers", "n_layers"),
        cached=2 * key_value_heads * head,
        hidden=hidden,
        intermediate=_first(config, "intermediate_size", "ffn_dim", "n_inner", "d_ff") or 4 * hidden,
        vocabulary=_first(config, "vocab_size"),
        context=0 if two_halves else _first(config, "max_position_embeddings", "n_positions"),
    )


def _first(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of ``names`` that ``config`` has as a number, or 0."""
    found = [config[name] for name in names if type(config.get(name)) is int]
    return int(found[0]) if found else 0


def read_request(generate: Mapping[str, Any], model: Mapping[str, Any]) -> Request:
    """Return how much the config's ``generate`` asks of ``model``, whose tokenizer counts the tokens of long texts."""
    prompts = _prompts(generate)
    alone = 1 if generate.get("exact") else len(prompts)
    asked = [generate, *(prompt.options for prompt in prompts if prompt.options)]
    copies = max(_number(one, key, 1) for one in asked for key in ("num_beams", "num_return_sequences"))
    sequences = min(alone, _number(generate, "batch_size", len(prompts))) * copies
    prompt = max(_tokens(prompt, model) for prompt in prompts)
    length = prompt + max(_number(one, "max_new_tokens", _number(one, "max_length", 0)) for one in asked)
    return Request(sequences, round_up(max(_LEAST_LENGTH, prompt)), round_up(max(_LEAST_LENGTH, length)))


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
    size, around = len(prompt.text.encode()), _TEMPLATE_TOKENS * len(prompt.messages or ())
    tokenizer = _tokenizer(tokenizer_folder(model) or checkpoint_folder(model)) if size > _LEAST_LENGTH else None
    with suppress(ConfigError), tokenizing(ConfigError, "generate.prompts"):  # which ``generate`` itself reports
        if tokenizer is not None:
            return around + len(tokenizer.encode(prompt.text).ids)
    return around + size // _BYTES_A_TOKEN + 1


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


def round_up(count: int) -> int:
    """Return ``count`` rounded up to four binary digits: at most an eighth more."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step
