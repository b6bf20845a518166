"""What is given below ``forward``, as the calls of a model's forward: named tensors, batch by batch.

Rows of like length share a call, the longest first, so that little is padding and what doesn't fit shows at once. Files
are opened as their call comes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from offstage.pipeline.errors import ConfigError, foreign
from offstage.pipeline.regular_files import read_object
from offstage.stages.calls.options import KEY, ForwardOptions, Text, files_of, hash_of, pins, read_texts
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.tokenizers import load_tokenizer
from offstage.stages.inputs.audio import read_audio
from offstage.stages.inputs.batches import by_length
from offstage.stages.inputs.images import read_image
from offstage.stages.inputs.processors import load_processor, sampling_rate
from offstage.stages.inputs.tensor_files import read_tensors

Tensors = dict[str, torch.Tensor]
Pins = Mapping[Path, str]
"""Files by the SHA-256 that their content must have."""
_NO_LIMIT = 10**9
"""Tokenizers that know of no limit say a number beyond this one."""


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """One call: which ``rows`` of what is given it has, and its ``arguments`` by name, on the cpu.

    ``made`` are the names of those that a tokenizer or a processor made; ``key`` is where it stands, or what made it.
    """

    key: str
    rows: tuple[int, ...]
    arguments: Tensors
    made: frozenset[str] = field(default_factory=frozenset)


def calls(
    given: ForwardOptions, model: Mapping[str, Any], asked: Mapping[str, Any] | None = None
) -> Iterator[ForwardCall]:
    """Yield the calls that ``given`` asks for, of the checkpoint of the config node ``model``; the largest comes first.

    ``asked`` is the ``identity`` of what is given, values and all: what was changed since is refused. Raises
    ``ConfigError``, which names the key and the value, for what can't be made a call.
    """
    source = ModelSource.of(model)
    texts = read_texts(given)
    if asked is not None and texts and [*texts.values()] != [_as_text(one) for one in asked["texts"]]:
        raise ConfigError(f"{KEY}.texts_file: {given.texts_file!r} has changed since the run began; run it again")
    pinned = {} if asked is None else pins(given, asked)
    kinds = [bool(texts), bool(given.images), bool(given.audio)]
    if not any(kinds):
        yield from _of_tensors(given, source, pinned)
        return
    if sum(kinds) > 1 or given.inputs:
        yield _together(given, source, texts, pinned)
    else:
        yield from _of_one_kind(given, source, texts, pinned)


def _as_text(stored: Any) -> Text:
    return stored if isinstance(stored, str) else (stored[0], stored[1])


def _of_one_kind(
    given: ForwardOptions, source: ModelSource, texts: Mapping[str, Text], pinned: Pins
) -> Iterator[ForwardCall]:
    if texts:
        return _of_texts(given, source, texts)
    return _of_images(given, source, pinned) if given.images else _of_audio(given, source, pinned)


def _of_tensors(given: ForwardOptions, source: ModelSource, pinned: Pins) -> Iterator[ForwardCall]:
    key = f"{KEY}.inputs"
    tensors = _tensors_of(given, pinned)
    counts = {name: len(tensor) if tensor.dim() else 0 for name, tensor in tensors.items()}
    count = max(counts.values())
    ids = tensors.get("input_ids")
    if ids is not None and ids.numel() and not ids.is_floating_point():
        _check_ids(key, source, int(ids.min()), int(ids.max()))
    if given.batch_size is None:
        yield ForwardCall(key, tuple(range(count)), tensors)
        return
    other = next((name for name, rows in counts.items() if rows != count), None)
    if other is not None:
        raise ConfigError(
            f"{KEY}.batch_size: {other!r} has shape {tuple(tensors[other].shape)}: only what has {count} rows, "
            "like the others, can be cut into batches; leave it null"
        )
    for start in range(0, count, given.batch_size):
        rows = range(start, min(start + given.batch_size, count))
        yield ForwardCall(key, tuple(rows), {name: tensor[rows.start : rows.stop] for name, tensor in tensors.items()})


def _tensors_of(given: ForwardOptions, pinned: Pins) -> Tensors:
    key, file = f"{KEY}.inputs", Path(str(given.inputs))
    tensors = read_tensors(key, file)
    if file in pinned and hash_of(file) != pinned[file]:
        raise ConfigError(f"{key}: {str(file)!r} has changed since the run began; run it again")
    return tensors


def _of_texts(given: ForwardOptions, source: ModelSource, texts: Mapping[str, Text]) -> Iterator[ForwardCall]:
    encode = _text_encoder(given, source, texts)
    names, listed = list(texts), list(texts.values())
    lengths = [len(ids) for ids in encode(listed, padding=False)["input_ids"]]
    for rows in by_length(lengths, size=given.batch_size):
        encoded = encode([listed[row] for row in rows], padding=True)
        yield _call(names[rows[0]], rows, {name: torch.tensor(value) for name, value in encoded.items()})


def _text_encoder(
    given: ForwardOptions, source: ModelSource, texts: Mapping[str, Text]
) -> Callable[..., Mapping[str, Any]]:
    """Return what makes tokens of a list of texts; ``texts`` are all that there are, by name."""
    tokenizer, first = load_tokenizer(source), next(iter(texts))
    if tokenizer is None:
        raise ConfigError(
            f"{first}: {texts[first]!r} is text and the checkpoint has no tokenizer; set model.tokenizer to a folder "
            "that has one, or give input_ids in a file: forward.inputs=FILE.npz"
        )
    most = _longest(tokenizer, source)
    alone = len(texts) == 1 or given.batch_size == 1
    if tokenizer.pad_token_id is None and not alone:
        raise ConfigError(f"{KEY}.batch_size: the tokenizer has no token to pad with; set forward.batch_size=1")

    def encode(listed: Sequence[Text], *, padding: bool) -> Mapping[str, Any]:
        pairs = [(text, None) if isinstance(text, str) else text for text in listed]
        seconds = None if isinstance(listed[0], str) else [second for _, second in pairs]
        cut = {"truncation": True, "max_length": most} if given.truncation and most else {}
        with foreign(ConfigError, f"{first.partition('[')[0]}: they can't be made tokens by the tokenizer"):
            encoded = tokenizer([one for one, _ in pairs], seconds, padding=padding and not alone, **cut)
        if not padding:
            _check_lengths(texts, encoded["input_ids"], most)
            _check_ids(f"{KEY}.texts", source, max(max(row) for row in encoded["input_ids"]))
        return dict(encoded)

    return encode


def _check_lengths(texts: Mapping[str, Text], ids: Sequence[Sequence[int]], most: int | None) -> None:
    for name, row in zip(texts, ids, strict=True):
        if not row:
            raise ConfigError(f"{name}: {texts[name]!r} has no tokens; give a longer text")
        if most is not None and len(row) > most:
            raise ConfigError(
                f"{name}: {len(row)} tokens are more than the model's context of {most}; shorten it, or set "
                "forward.truncation=true"
            )


def _check_ids(key: str, source: ModelSource, *ids: int) -> None:
    """Refuse token ids that the model has no embedding for, before its forward trips over them."""
    words = min((one for one in _numbers(source, "vocab_size")), default=None)
    for token in ids:
        if words is not None and not 0 <= token < words:
            raise ConfigError(f"{key}: token id {token} is none of the model's {words} words; give others")


def _longest(tokenizer: Any, source: ModelSource) -> int | None:
    """Return how many tokens the model has positions for; null where neither tokenizer nor config says it."""
    said = [tokenizer.model_max_length, *_numbers(source, "max_position_embeddings")]
    return min((one for one in said if isinstance(one, int) and 0 < one < _NO_LIMIT), default=None)


def _numbers(source: ModelSource, name: str) -> list[int]:
    """Return what the ``config.json`` of ``source`` says under ``name``, for all of it and for its part of text."""
    config = read_object(source.folder / "config.json")
    text = config.get("text_config")
    values = [place.get(name) for place in (config, text if isinstance(text, dict) else {})]
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool)]


def _of_images(given: ForwardOptions, source: ModelSource, pinned: Pins) -> Iterator[ForwardCall]:
    files = files_of(given, "images")
    names = list(files)
    processor = load_processor(source, "image processor", key=f"{KEY}.images")
    for rows in by_length([0] * len(files), size=given.batch_size):
        images = [read_image(names[row], files[names[row]], sha256=pinned.get(files[names[row]])) for row in rows]
        yield _call(names[rows[0]], rows, _processed(f"{KEY}.images", processor, images=images))


def _of_audio(given: ForwardOptions, source: ModelSource, pinned: Pins) -> Iterator[ForwardCall]:
    files = files_of(given, "audio")
    names = list(files)
    extractor = load_processor(source, "feature extractor", key=f"{KEY}.audio")
    pads = inspect.signature(extractor.__call__).parameters.get("padding")
    padding = {} if pads is not None and pads.default else {"padding": True}
    rate = sampling_rate(extractor)
    for rows in by_length([file.stat().st_size for file in files.values()], size=given.batch_size):
        sounds = [
            read_audio(names[row], files[names[row]], rate=rate, sha256=pinned.get(files[names[row]])) for row in rows
        ]
        processed = _processed(f"{KEY}.audio", extractor, raw_speech=sounds, sampling_rate=rate, **padding)
        yield _call(names[rows[0]], rows, processed)


def _together(given: ForwardOptions, source: ModelSource, texts: Mapping[str, Text], pinned: Pins) -> ForwardCall:
    """Return the one call of things of several kinds: through the checkpoint's processor, beside named tensors."""
    kinds = [kind for kind, one in (("texts", texts), ("images", given.images), ("audio", given.audio)) if one]
    key = KEY if len(kinds) > 1 else f"{KEY}.{kinds[0]}"
    beside = _tensors_of(given, pinned) if given.inputs else {}
    if key != KEY:
        (call,) = _of_one_kind(given, source, texts, pinned)
    else:
        call = _by_processor(given, source, texts, pinned)
    twice = sorted(beside.keys() & call.arguments.keys())
    if twice:
        raise ConfigError(f"{KEY}.inputs: {twice[0]!r} is made of {key} too; give it once")
    return ForwardCall(call.key, call.rows, {**call.arguments, **beside}, call.made)


def _by_processor(given: ForwardOptions, source: ModelSource, texts: Mapping[str, Text], pinned: Pins) -> ForwardCall:
    processor = load_processor(source, "processor", key=KEY)
    if source.tokenizer:
        processor.tokenizer = load_tokenizer(source)
    images = [read_image(name, file, sha256=pinned.get(file)) for name, file in files_of(given, "images").items()]
    rate = sampling_rate(getattr(processor, "feature_extractor", None))
    sounds = [
        read_audio(name, file, rate=rate, sha256=pinned.get(file)) for name, file in files_of(given, "audio").items()
    ]
    pairs = [text for text in texts.values() if not isinstance(text, str)]
    if pairs:
        raise ConfigError(f"{next(iter(texts))}: {pairs[0]!r} is a pair of texts, beside images or audio; give text")
    asked: dict[str, Any] = {"text": list(texts.values())} if texts else {}
    asked |= {"images": images} if images else {}
    asked |= {"audio": sounds, "sampling_rate": rate} if sounds else {}
    processed = _processed(KEY, processor, **asked, padding=True)
    return _call(KEY, tuple(range(max(len(texts), len(images), len(sounds)))), processed)


def _processed(key: str, processor: Any, **asked: Any) -> Tensors:
    """Return the tensors that ``processor`` makes of what it is ``asked``."""
    with foreign(ConfigError, f"{key}: {type(processor).__name__} can't make inputs of them"):
        processed = dict(processor(**asked, return_tensors="pt"))
    return {name: value for name, value in processed.items() if isinstance(value, torch.Tensor)}


def _call(key: str, rows: Sequence[int], tensors: Tensors) -> ForwardCall:
    return ForwardCall(key, tuple(rows), tensors, frozenset(tensors))
