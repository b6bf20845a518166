"""A generation as it is read: what was asked, and the answer piece by piece, each once and none of half a character."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from offstage.stages.generate.transcript import LiveTranscript, decode_after, transcript

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
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


@pytest.mark.parametrize(
    ("prompt", "is_chat", "text", "shown"),
    [
        ("Once", False, " upon", "Once upon"),
        ("Hi", True, "Hello", "user: Hi\nassistant: Hello"),
        (CHAT, False, "Hello", "system: Be brief.\nuser: Hi\nassistant: Hello"),
        ([5, 6], True, "abc", "[5, 6] → abc"),
        ([5, 6], False, None, "[5, 6] → [7, 8]"),
    ],
)
def test_a_transcript_has_what_was_asked_before_the_answer(
    prompt: object, is_chat: bool, text: str | None, shown: str
) -> None:
    output = {"prompt": prompt, "text": text, "token_ids": [7, 8]}
    assert transcript(output, is_chat=is_chat) == shown


def shown(tokenizer: Any, ids: list[int], *, answer: str | None = None) -> list[str]:
    """Return the pieces that are shown as ``ids`` come, one more each time, and in the end the whole ``answer``."""
    pieces: list[str] = []
    live = LiveTranscript(pieces.append, "", tokenizer, before=())
    for count in range(1, len(ids) + 1):
        live.more(torch.tensor([ids[:count]]))
    live.finish(tokenizer.decode(ids, skip_special_tokens=True) if answer is None else answer)
    return [piece for piece in pieces if piece]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["bytes", "fallback"])
def test_the_pieces_are_the_text_and_no_piece_has_half_a_character(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] if kind == "bytes" else [1 + b for b in text.encode()]
    came = shown(tokenizer, ids)
    assert "".join(came) == text
    assert not any(INCOMPLETE in piece for piece in came)


def test_words_come_as_they_are_decoded() -> None:
    ids = TOKENIZERS["bytes"]("one two three four", add_special_tokens=False)["input_ids"]
    assert len(shown(TOKENIZERS["bytes"], ids)) == len(ids)


@pytest.mark.parametrize("tokenizer", [TOKENIZERS["cleaned"], None], ids=["cleans up", "of another library"])
def test_what_no_stream_can_decode_is_shown_in_the_end(tokenizer: Any) -> None:
    assert shown(tokenizer, [1, 2, 4, 5], answer="don't") == ["don't"]


def test_a_text_that_turns_out_to_be_another_is_given_whole_on_a_line_of_its_own() -> None:
    ids = TOKENIZERS["bytes"]("one", add_special_tokens=False)["input_ids"]
    came = shown(TOKENIZERS["bytes"], ids, answer="two")
    assert ("".join(came[:-1]), came[-1]) == ("one", "\ntwo")


def test_bytes_that_are_no_character_come_with_the_whole_text() -> None:
    tokenizer = TOKENIZERS["fallback"]
    ids = [1 + 0xE6, tokenizer.convert_tokens_to_ids("s"), 1 + 0x95, 1 + 0xB0]
    assert "".join(shown(tokenizer, ids)).endswith(tokenizer.decode(ids))


def test_an_answer_begins_with_the_space_that_belongs_between_it_and_the_prompt() -> None:
    """▁word after ▁a is another text than at the beginning of one, where its space is left out."""
    tokenizer = TOKENIZERS["fallback"]
    a, word, end = (tokenizer.convert_tokens_to_ids(token) for token in ("▁a", "▁word", "s"))
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    assert decode([word]) == "word"
    assert decode_after(decode, [a] * 20, [word, end]) == " words"
    assert decode_after(decode, [], [word]) == decode_after(decode, [tokenizer.unk_token_id], [word]) == "word"
