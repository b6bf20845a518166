"""Token ids as text while they come: each piece of it once, and no half of a character.

The text of some tokens is seldom the sum of their texts: a character may take several tokens, and what follows a space
may take it away. So all ids are decoded anew, and what is new in the text is given out as far as no later token can
change it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer has for bytes that are no character, or none yet."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A token that is one byte. Such tokens in a row are characters together or, if one of them isn't, not at all."""
_CONTEXT = 8
"""So many tokens of a prompt show how the text after them begins."""
_EACH_UP_TO = 2048
"""A text of so many tokens is decoded for each of them, a longer one for fewer: all in all it takes linear time."""


def decode_after(decode: Callable[[Sequence[int]], str], before: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of ``ids`` as it goes on after that of the ids ``before``.

    At the beginning of a text some tokenizers leave out a space that belongs between two words.
    """
    context = before[-_CONTEXT:]
    head = decode(context)
    whole = decode([*context, *ids]) if head else ""
    return whole[len(head) :] if head and whole.startswith(head) else decode(ids)


class Detokenizer:
    """Makes text of the ids that one sequence has so far; ``decode`` makes text of whole ids, by ``tokenizer``."""

    def __init__(self, tokenizer: Any, decode: Callable[[Sequence[int]], str]) -> None:
        self._tokenizer, self._decode = tokenizer, decode
        self._cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._given = ""
        self._decoded = 0

    def more(self, ids: Sequence[int]) -> str:
        """Return the text that ``ids``, all there are so far, have and had not before; empty while it isn't certain."""
        if len(ids) <= self._decoded + (len(ids) - 1) // _EACH_UP_TO:
            return ""
        self._decoded = len(ids)
        return self._new(self._certain(self._decode(ids[: self._whole(ids)])))

    def rest(self, text: str) -> str:
        """Return what has not been given of the whole ``text``; all of it, on a new line, where that was another."""
        return self._new(text) if text.startswith(self._given) else f"\n{text}"

    def _new(self, text: str) -> str:
        if not text.startswith(self._given):
            return ""
        new, self._given = text[len(self._given) :], text
        return new

    def _certain(self, text: str) -> str:
        """Return ``text`` without what the next token may change: half a character, spaces, words to be cleaned up.

        Cleaning up joins three words at most: the n, the apostrophe and the t of a negation.
        """
        certain = text.rstrip(_INCOMPLETE).rstrip()
        if not self._cleans:
            return certain
        words = certain.rsplit(None, 2)
        return words[0] if len(words) > 2 else ""

    def _whole(self, ids: Sequence[int]) -> int:
        """Return how many of ``ids`` there are before the bytes in the end, which aren't characters yet."""
        count = len(ids)
        while count and self._is_byte_or_nothing(ids[count - 1]):
            count -= 1
        return count

    def _is_byte_or_nothing(self, token: int) -> bool:
        return token in self._special or bool(_BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token))))
