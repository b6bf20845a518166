"""What a request takes beside weights: the shape of the model, read from its ``config.json``, and that of the request.

Sizes are upper bounds that don't need the model's code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from offstage.pipeline.regular_files import read_object
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.empty_init.skeleton import CacheSpec, Moment
from offstage.stages.inputs.quantized_cache import QuantizedCache

_ENCODERS = ("vision_config", "audio_config", "encoder")
"""The keys of a ``config.json`` below which the shape of an encoder of images or audio stands."""

_LAYERS = ("num_hidden_layers", "n_layer", "num_decoder_layers", "num_layers", "n_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_STATES = ("state_size", "attention_hidden_size")
"""What stands in the place of heads where a state is kept instead of keys and values."""
_LATENT = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
"""What multi-head latent attention keeps of a token, compressed and rotated, and what it makes for each head of it."""

LEAST_LENGTH = 64
"""Shorter sequences are planned for as if they had so many tokens."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a decoder: ``cached`` is the elements of keys and values that a layer keeps for a token, at most.

    They stand for what a rehearsal would have shown, of an assistant and of a model whose code refuses one. Where keys
    and values are kept compressed, ``expanded`` are the elements that a layer makes of them for each pass.
    ``context`` is how many tokens it has positions for, 0 where its config doesn't say, and for a decoder that
    ``has_encoder`` beside it.
    """

    layers: int = 0
    cached: int = 0
    hidden: int = 0
    intermediate: int = 0
    vocabulary: int = 0
    context: int = 0
    has_encoder: bool = False
    expanded: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """How much is asked for at once: ``sequences``, the tokens of the longest ``prompt``, its ``length`` in the end.

    Beside an encoder the prompt is the encoder's, and the length that of the decoder's alone.
    ``length`` is 0 where one forward is all: then no keys and values are kept for a next token. ``positions`` is of how
    many positions of each sequence a forward gives logits, and ``normalised`` of how many of these, of all sequences
    together, softmax is taken at once; null: of all. Each prompt or text is ``copies`` of the sequences. So many
    ``members`` go through the model in lockstep, with as many sequences each, divided in ``groups``. Each token takes
    so many ``forwards`` of them all, one after the other, over a cache each. The host keeps
    ``result_bytes`` of all results to the end. The logits of so many steps are ``kept``, in float32. So many guesses
    are ``judged`` in lockstep with the token before them, over one cache. ``assistant_bytes`` are what a second model
    takes beside, ``assistant_cache`` its keys and values among them, of which each member has some. ``moments`` are
    those of a forward that is known at its very shape, and ``caches`` what it leaves, where that isn't known of the
    model. ``cache_on_host`` says that keys and values wait there, ``cache_bits`` how they are quantised:
    so many positions are then ``decoded`` at most. All in all there are ``rows`` of prompts, the longest of ``routed``
    tokens, and each is decoded in so many ``steps``; 0 where that isn't known. These change nothing of
    the room that it takes: requests that differ in them alone are alike.
    """

    sequences: int = 1
    prompt: int = LEAST_LENGTH
    length: int = LEAST_LENGTH
    positions: int = 1
    normalised: int | None = None
    copies: int = 1
    members: int = 1
    groups: int = 1
    forwards: int = 1
    result_bytes: int = 0
    kept: int = 0
    judged: int = 0
    assistant_bytes: int = 0
    assistant_cache: int = 0
    moments: tuple[Moment, ...] = ()
    caches: tuple[CacheSpec, ...] = ()
    cache_on_host: bool = False
    cache_bits: QuantizedCache | None = None
    decoded: int = 0
    rows: int = field(default=1, compare=False)
    routed: int = field(default=0, compare=False)
    steps: int = field(default=0, compare=False)

    @property
    def prompts(self) -> int:
        """How many prompts or texts the sequences of one member answer."""
        return self.sequences // self.copies

    @property
    def together(self) -> int:
        """How many members share a pass: those of a group."""
        return -(-self.members // self.groups)

    @property
    def all_assistant_bytes(self) -> int:
        """What a second model takes beside all members."""
        return self.assistant_bytes + (self.members - 1) * self.assistant_cache

    @property
    def tokens(self) -> int:
        """The tokens that all sequences have together in the end, of which keys and values are kept."""
        return self.sequences * self.length

    @property
    def pass_tokens(self) -> int:
        """The tokens of one pass of decoding, a group's together; of the one forward where that is all."""
        return self.together * self.sequences * (self.positions if self.length else self.prompt)

    @property
    def prompt_tokens(self) -> int:
        """The tokens of the prompts that go together; copies are routed alike."""
        return self.together * self.prompts * self.routed

    @property
    def passes(self) -> int:
        """The passes of decoding that answer all prompts."""
        return self.steps * -(-self.rows // max(1, self.together * self.prompts))


def read_geometry(model: Mapping[str, Any]) -> Geometry:
    """Return the shape that the ``config.json`` of the config's ``model`` states; nothing where there is none.

    What it leaves out, its type's defaults say.
    """
    return geometry_of(_with_defaults(read_object(ModelSource.of(model).folder / "config.json")))


def _with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``config`` with its type's defaults where it doesn't state the shape of a decoder.

    They are the library's, which takes seconds to import: what ``save_pretrained`` has written states all of it.
    """
    states = (_LAYERS, _HIDDEN, (*_HEADS, *_STATES))
    kind = config.get("model_type")
    if not isinstance(kind, str) or "text_config" in config or all(_first(config, *names) for names in states):
        return config
    return {**_defaults(kind), **config}


@cache
def _defaults(kind: str) -> Mapping[str, Any]:
    """Return what a config of this ``model_type`` says by itself; nothing of one that transformers doesn't know."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[kind]().to_dict() if kind in CONFIG_MAPPING else {}


def geometry_of(config: Mapping[str, Any]) -> Geometry:
    """Return the shape that ``config``, the content of a ``config.json``, states."""
    has_encoder = bool(config.get("is_encoder_decoder"))
    config = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config
    heads, hidden = _first(config, *_HEADS), _first(config, *_HIDDEN)
    latent, rotary, plain, value = (_first(config, name) for name in _LATENT)
    head = _first(config, "head_dim", "d_kv") or (hidden // heads if heads else 0)
    key_value_heads = _first(config, "num_key_value_heads", "num_kv_heads") or heads
    return Geometry(
        layers=_first(config, *_LAYERS),
        cached=latent + rotary if latent else 2 * key_value_heads * head,
        hidden=hidden,
        intermediate=_first(config, "intermediate_size", "ffn_dim", "n_inner", "d_ff") or 4 * hidden,
        vocabulary=_first(config, "vocab_size"),
        context=0 if has_encoder else _first(config, "max_position_embeddings", "n_positions"),
        has_encoder=has_encoder,
        expanded=heads * (2 * plain + rotary + value) if latent else 0,
    )


def encoder_rows_bytes(model: Mapping[str, Any], inputs: Mapping[str, tuple[int, ...]]) -> int:
    """Return the most that an encoder of images or audio holds of one prompt, in bytes, in float32.

    ``inputs`` are the shapes of what its processor makes: pixels of shape (…, channels, height, width), patches of
    shape (patches, size), or audio of shape (…, features, frames). It stands for what a rehearsal would have shown.
    """
    config = read_object(ModelSource.of(model).folder / "config.json")
    halves = [config[key] for key in _ENCODERS if isinstance(config.get(key), dict)] or [config]
    rows = max((_rows(shape, _first(half, "patch_size")) for half in halves for shape in inputs.values()), default=0)
    return max(rows * (6 * hidden + 2 * wide) * 4 for hidden, wide in map(_widths, halves))


def _widths(config: Mapping[str, Any]) -> tuple[int, int]:
    hidden = _first(config, "embed_dim", "hidden_size", "d_model")
    return hidden, _first(config, "intermediate_size", "encoder_ffn_dim", "ffn_dim") or 4 * hidden


def _rows(shape: tuple[int, ...], patch: int) -> int:
    """Return how many positions an encoder makes of an input of that ``shape``, at most."""
    if len(shape) > 3 and patch:
        return math.prod(shape[:-3]) * math.ceil(shape[-2] / patch) * math.ceil(shape[-1] / patch)
    return shape[0] if len(shape) == 2 else math.prod(shape[:-2]) * shape[-1] if len(shape) > 2 else 0


def _first(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of ``names`` that ``config`` has as a number, or 0."""
    numbers = [config[name] for name in names if type(config.get(name)) is int]
    return int(numbers[0]) if numbers else 0


def round_up(count: int) -> int:
    """Return ``count`` rounded up to four binary digits: at most an eighth more."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step
