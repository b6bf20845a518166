"""A generation as it is read on a screen: what was asked and what came, in the end or while it comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offstage.stages.inputs.prompts import MEDIA, Content, Told, text_of

if TYPE_CHECKING:
    import torch

    from offstage.stages.generate.detokenizer import Detokenizer


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


class LiveTranscript:
    """The transcript of the one sequence that is being decoded, given to ``show`` piece by piece."""

    def __init__(self, show: Callable[[str], object], prompt: str, detokenizer: Detokenizer) -> None:
        self._show, self._waiting, self._detokenizer = show, prompt, detokenizer

    def more(self, tokens: torch.Tensor) -> None:
        """Show what is new in the text of ``tokens``, all new ones so far, of shape (1, tokens)."""
        self._add(self._detokenizer.more(tokens[0].tolist()))

    def finish(self, text: str) -> None:
        """Show what isn't there yet of the whole ``text`` of the answer."""
        self._add(self._detokenizer.rest(text))
        self._show(self._waiting)

    def _add(self, text: str) -> None:
        if text:
            self._show(f"{self._waiting}{text}")
            self._waiting = ""
