"""Texts as token ids, and these cut into windows that a model has a context for.

Windows begin every ``stride`` tokens. Each scores what no window before it has scored, after as many tokens as it has
in common with the last: with a stride of the window's size none, and one less than that scores every token but a
text's first. The first token of a window has nothing before it that the model could foretell it from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offstage.pipeline.errors import ConfigError, Fault, OffstageError
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.tokenizers import load_tokenizer
from offstage.stages.inference.tokens import encode_text
from offstage.stages.inputs.texts import ScoredText, ScoreOptions, check_stride, read_scored_texts
from offstage.stages.plan.request.geometry import read_geometry

_INSTEAD = "score.texts=[[5,6,7]]"


@dataclass(frozen=True, slots=True)
class EncodedText:
    """``ids`` are what the model that foretells tokens gets, ``first`` is the first of them that may be scored.

    ``source`` is what an encoder gets beside; it is empty for a model without one. One that ``is_whole`` isn't cut:
    the model sees all of the context when it foretells what continues it.
    """

    ids: Sequence[int]
    first: int
    source: Sequence[int] = ()
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Window:
    """The tokens ``begin`` to ``end`` of text number ``text``: ``ids``, of which those from ``first`` on are scored.

    ``index`` counts the windows of all texts; ``first`` counts from the text's beginning, as ``begin`` and ``end`` do.
    The last of the ids need not be seen to be foretold: where it has no room it is ``unseen``.
    """

    index: int
    text: int
    begin: int
    end: int
    first: int
    ids: Sequence[int]
    source: Sequence[int] = ()
    unseen: int = 0

    @property
    def seen(self) -> Sequence[int]:
        """The token ids that the model is given."""
        return self.ids[: len(self.ids) - self.unseen]

    @property
    def scored(self) -> Sequence[int]:
        """The token ids that are scored."""
        return self.ids[self.first - self.begin :]


def encode(name: str, text: ScoredText, tokenizer: Any, *, has_encoder: bool) -> EncodedText:
    """Return the tokens of ``text``, which stands at ``name``; a ``ConfigError`` where there are none to score.

    Text begins with the special tokens that the tokenizer puts there. A model that ``has_encoder`` gets the context in
    it, and foretells the continuation, which has no special tokens then.
    """
    if has_encoder:
        return _encode_halves(name, text, tokenizer)
    content, context = text.content, text.context
    if isinstance(content, str) and isinstance(context, str):
        ids, first = _encode_pair(name, context, content, tokenizer)
    elif isinstance(content, str):
        ids, first = encode_text(name, content, tokenizer, instead=_INSTEAD), 1
    else:
        ids, first = [*_ids(context), *content], max(1, len(_ids(context)))
    if len(ids) < 2:
        raise ConfigError(f"{name}: {content!r} is one token, and nothing is before it to foretell it; give more")
    return EncodedText(ids, first, is_whole=context is not None)


def _encode_halves(name: str, text: ScoredText, tokenizer: Any) -> EncodedText:
    content, context = text.content, text.context
    if context is None:
        raise ConfigError(
            f"{name}: the model has an encoder, and its decoder scores what follows; give a mapping of context and "
            "continuation"
        )
    if isinstance(content, str) and isinstance(context, str):
        source = encode_text(f"{name}.context", context, tokenizer, instead=_INSTEAD)
        ids = encode_text(f"{name}.continuation", content, tokenizer, instead=_INSTEAD, special=False)
        return EncodedText(ids, 0, source, is_whole=True)
    return EncodedText(_ids(content), 0, _ids(context), is_whole=True)


def _ids(tokens: object) -> list[int]:
    return tokens if isinstance(tokens, list) else []


def _encode_pair(name: str, context: str, continuation: str, tokenizer: Any) -> tuple[list[int], int]:
    """Return the tokens of both together, and the place of the continuation's first.

    They are made in one, since a word's first token has the space before it: white space at the end of the context
    counts as the continuation's. Special tokens that the tokenizer puts after a text are left out.
    """
    kept = context.rstrip()
    both = context + continuation
    whole, plain = (encode_text(name, both, tokenizer, instead=_INSTEAD, special=special) for special in (True, False))
    before = encode_text(name, kept, tokenizer, instead=_INSTEAD, special=False)
    spare = range(len(whole) - len(plain) + 1)
    lead = next((start for start in spare if whole[start : start + len(plain)] == plain), 0)
    if len(before) >= len(plain):
        raise ConfigError(f"{name}.continuation: {continuation!r} has no token of its own after its context; give more")
    return whole[: lead + len(plain)], max(1, lead + len(before))


def cut(texts: Iterable[EncodedText], *, window: int, stride: int) -> Iterator[Window]:
    """Yield the windows of ``texts``, of each of which the model sees at most ``window`` tokens; what continues a
    context is one with it.
    """
    index = 0
    for number, text in enumerate(texts):
        done, size = text.first, len(text.ids)
        for begin in range(0, size, size if text.is_whole else stride):
            end = size if text.is_whole else min(begin + window, size)
            first = done if text.source else max(done, begin + 1)
            unseen = 0 if text.source else max(0, end - begin - window)
            if first < end:
                yield Window(index, number, begin, end, first, text.ids[begin:end], text.source, unseen)
                index += 1
            done = max(done, end)
            if end == size:
                break


def check_encoded_texts(options: ScoreOptions, model: Mapping[str, Any], *, has_encoder: bool) -> Iterable[Fault]:
    """Yield the first text that can't be made tokens, tokens that the model doesn't have, and what fits no window.

    What is wrong with the checkpoint or its tokenizer is said by who opens them.
    """
    try:
        if not model.get("path") or not ModelSource.of(model).folder.is_dir():
            return
        texts, geometry = read_scored_texts(options), read_geometry(model)
        needs = any(isinstance(text.content, str) for text in texts.values())
        tokenizer = load_tokenizer(ModelSource.of(model)) if needs else None
    except OffstageError:
        return
    window, _ = options.windows(geometry.context)
    if 0 < geometry.context < window:
        yield Fault("score.window", f"{window} tokens are more than the model's context of {geometry.context}")
    yield from check_stride(options, window) if options.window is None else ()
    try:
        for name, text in texts.items():
            encoded = encode(name, text, tokenizer, has_encoder=has_encoder)
            yield from _faults(name, encoded, window=window, words=geometry.vocabulary)
    except ConfigError as error:
        yield Fault.of(error)


def _faults(name: str, encoded: EncodedText, *, window: int, words: int) -> Iterator[Fault]:
    """Yield what is wrong with the tokens of one text, of which all must be in one window if it is whole."""
    largest, longest = max(*encoded.ids, *encoded.source, 0), max(len(encoded.ids), len(encoded.source))
    room = window if encoded.source else window + 1  # the last token is foretold without being seen
    if 0 < words <= largest:
        yield Fault(name, f"token id {largest} is beyond the model's {words} words; give ids below")
    if encoded.is_whole and longest > room:
        yield Fault(
            name,
            f"context and continuation have {longest} tokens, more than the {room} of a window of {window}, and aren't "
            "cut; shorten them, or raise score.window",
        )
