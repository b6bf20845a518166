"""Text piece by piece: all of it, each piece once, and never half of a character."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from offstage.stages.generate.detokenizer import Detokenizer, decode_after

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
TINY = Path(__file__).parents[3] / "conf" / "checkpoints" / "tiny"
TEXTS = [
    "plain words, as ever.",
    "naïve café",
    "数学は美しい。",
    "👩‍👩‍👧‍👦 and 🇯🇵",
    "a\n\n  b\t",
    "e\u0301te\u0301",
    "Привет, мир",
]


def bytewise() -> Any:
    """Return the embedded model's tokenizer: pieces of UTF-8, so of characters too."""
    return AutoTokenizer.from_pretrained(TINY)


def falling_back_to_bytes() -> Any:
    """Return a tokenizer as Llama 2 had it: words, and bytes for what isn't one."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "▁word", "s", ".", "é", "▁"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def of_word_pieces(*, cleans: bool = False) -> Any:
    """Return a tokenizer as BERT has it: pieces that are joined, and spaces that are taken away again."""
    words = ["[UNK]", "do", "n", "n't", "'", "t", "##s", ".", ",", "it", "s", "!"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece("##", cleanup=cleans)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", clean_up_tokenization_spaces=cleans)


TOKENIZERS = {"bytes": bytewise(), "fallback": falling_back_to_bytes()}
TOKENIZERS |= {"pieces": of_word_pieces(), "cleaned": of_word_pieces(cleans=True)}


def pieces(tokenizer: Any, ids: list[int]) -> tuple[list[str], str]:
    """Return the pieces that come as ``ids`` come, one more each time, and the whole text."""

    def decode(some: Any) -> str:
        return str(tokenizer.decode(some, skip_special_tokens=True))

    detokenizer = Detokenizer(tokenizer, decode)
    given = [detokenizer.more(ids[: count + 1]) for count in range(len(ids))]
    return [*given, detokenizer.rest(decode(ids))], decode(ids)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["bytes", "fallback"])
def test_the_pieces_are_the_text_and_no_piece_has_half_a_character(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] if kind == "bytes" else [1 + b for b in text.encode()]
    came, whole = pieces(tokenizer, ids)
    assert "".join(came) == whole == text
    assert not any(INCOMPLETE in piece for piece in came)


def test_words_come_as_they_are_decoded() -> None:
    ids = TOKENIZERS["bytes"]("one two three four", add_special_tokens=False)["input_ids"]
    came, _ = pieces(TOKENIZERS["bytes"], ids)
    assert len(list(filter(None, came))) == len(ids)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(numbers=st.lists(st.integers(0, 5000), max_size=24))
@example(numbers=[1, 2, 4, 5])  # do, n, ', t: three words become a part of the one before them
def test_whatever_tokens_come_the_pieces_are_the_whole_text(kind: str, numbers: list[int]) -> None:
    tokenizer = TOKENIZERS[kind]
    came, whole = pieces(tokenizer, [number % len(tokenizer) for number in numbers])
    assert "".join(came) == whole


def test_a_text_that_turns_out_to_be_another_is_given_whole_on_a_line_of_its_own() -> None:
    texts = {1: "one", 2: "two"}
    detokenizer = Detokenizer(TOKENIZERS["bytes"], lambda ids: texts[len(ids)])
    assert (detokenizer.more([5]), detokenizer.more([5, 6]), detokenizer.rest("two")) == ("one", "", "\ntwo")


def test_a_long_text_is_decoded_for_some_of_its_tokens_only() -> None:
    asked: list[int] = []

    def decode(ids: Any) -> str:
        asked.append(len(ids))
        return "x" * len(ids)

    detokenizer = Detokenizer(TOKENIZERS["bytes"], decode)
    ids = [5] * 8192
    text = "".join(detokenizer.more(ids[:count]) for count in range(1, 8193)) + detokenizer.rest("x" * 8192)
    assert text == "x" * 8192
    assert sum(asked) < 5000 * 8192 / 2
    assert asked[:2048] == list(range(1, 2049))


def test_an_answer_begins_with_the_space_that_belongs_between_it_and_the_prompt() -> None:
    """▁word after ▁a is another text than at the beginning of one, where its space is left out."""
    tokenizer = TOKENIZERS["fallback"]
    a, word, end = (tokenizer.convert_tokens_to_ids(token) for token in ("▁a", "▁word", "s"))
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    assert decode([word]) == "word"
    assert decode_after(decode, [a] * 20, [word, end]) == " words"
    assert decode_after(decode, [], [word]) == decode_after(decode, [tokenizer.unk_token_id], [word]) == "word"
