"""A generation as it is read on a screen: what was asked and what came, in the end or while it comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offstage.stages.inputs.prompts import MEDIA, Content, Told, text_of

if TYPE_CHECKING:
    import torch

_CONTEXT = 8
"""So many tokens of a prompt show how the text after them begins."""


def before_answer(prompt: Told, *, is_chat: bool) -> str:
    """Return what stands before the answer to ``prompt``; ``is_chat`` says whether text is what a user says.

    Images and recordings stand in front, by the names of their files.
    """
    if isinstance(prompt, dict):
        files = [Path(file["path"]).name for key in MEDIA for file in prompt.get(key, ())]
        content: Content = prompt.get("messages") or prompt.get("prompt") or ""
        return f"[{', '.join(files)}] {before_answer(content, is_chat=is_chat and bool(content))}"
    messages = [one for one in prompt if isinstance(one, dict)]
    if isinstance(prompt, str) and is_chat:
        messages = [{"role": "user", "content": prompt}]
    if messages:
        return "".join(f"{one['role']}: {text_of(one)}\n" for one in messages) + "assistant: "
    return prompt if isinstance(prompt, str) else f"{prompt} → "


def transcript(output: Mapping[str, Any], *, is_chat: bool) -> str:
    """Return prompt and answer of one of a record's ``outputs``."""
    answer = output["token_ids"] if output["text"] is None else output["text"]
    return f"{before_answer(output['prompt'], is_chat=is_chat)}{answer}"


def decode_after(decode: Callable[[Sequence[int]], str], before: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of ``ids`` as it goes on after that of the ids ``before``.

    At the beginning of a text some tokenizers leave out a space that belongs between two words.
    """
    context = before[-_CONTEXT:]
    head = decode(context)
    whole = decode([*context, *ids]) if head else ""
    return whole[len(head) :] if head and whole.startswith(head) else decode(ids)


class LiveTranscript:
    """The transcript of the one sequence that is being decoded, given to ``show`` piece by piece, after the ``prompt``.

    The text goes on after that of the ids ``before``. By a ``tokenizer`` that isn't made of the library tokenizers, or
    cleans up spaces afterwards, there is nothing to show before the answer is whole.
    """

    def __init__(self, show: Callable[[str], object], prompt: str, tokenizer: Any, *, before: Sequence[int]) -> None:
        from tokenizers.decoders import DecodeStream

        cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
        self._tokenizer: Any = None if cleans else getattr(tokenizer, "backend_tokenizer", None)
        self._stream = DecodeStream(list(before[-_CONTEXT:]), skip_special_tokens=True)
        self._show, self._waiting, self._given, self._seen = show, prompt, "", 0

    def more(self, tokens: torch.Tensor) -> None:
        """Show what is new in the text of ``tokens``, all new ones so far, of shape (1, tokens)."""
        new, self._seen = tokens[0, self._seen :].tolist(), tokens.shape[1]
        for token in new if self._tokenizer is not None else ():
            with suppress(Exception):  # bytes that were no character after all: the whole text comes in the end
                self._add(self._stream.step(self._tokenizer, token) or "")

    def finish(self, text: str) -> None:
        """Show what isn't there yet of the answer's whole ``text``; all of it, on a new line, where it is another."""
        self._add(text[len(self._given) :] if text.startswith(self._given) else f"\n{text}")
        self._show(self._waiting)

    def _add(self, text: str) -> None:
        if text:
            self._show(f"{self._waiting}{text}")
            self._waiting, self._given = "", self._given + text
