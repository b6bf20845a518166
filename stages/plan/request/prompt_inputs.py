"""A prompt with images or audio as what the model is given: through the chat's template and the processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offstage.pipeline.errors import ConfigError
from offstage.stages.inputs.prompt_processor import ModelInputs, PromptProcessor
from offstage.stages.plan.request.messages import Message
from offstage.stages.plan.request.prompts import Prompt


def prompt_inputs(name: str, prompt: Prompt, processor: PromptProcessor, generate: Mapping[str, Any]) -> ModelInputs:
    """Return what the model is given for ``prompt``, which stands at ``name``, as the node ``generate`` asks for it.

    Raises ``ConfigError`` where the processor takes no such media, or a file holds none.
    """
    messages = conversation(prompt, generate, has_template=processor.has_template, place=processor.image_token)
    if messages is None:
        return processor.encode(name, prompt.text, prompt.media)
    return processor.encode(name, processor.templated(name, messages), prompt.media, templated=True)


def conversation(
    prompt: Prompt, generate: Mapping[str, Any], *, has_template: bool, place: str | None = None
) -> list[Message] | None:
    """Return the chat that ``prompt`` is or begins, null if it is text to go on with.

    Its media stand before its text, unless the text itself has their ``place``.
    """
    chat, system, given = generate.get("chat"), generate.get("system"), prompt.messages
    if (given is not None or chat is True) and not has_template:
        raise ConfigError(
            "generate.chat: the tokenizer has no template for chats; give text and generate.chat=false, "
            "or set model.tokenizer to a folder whose tokenizer has one"
        )
    if given is None and (chat is False or not has_template):
        return None
    messages = [{"role": "user", "content": _content(prompt, place)}] if given is None else given
    opens = messages[0]["role"] == "system" or system is None
    said = [{"type": "text", "text": system or ""}] if prompt.media else system or ""
    return messages if opens else [{"role": "system", "content": said}, *messages]


def _content(prompt: Prompt, place: str | None) -> str | list[dict[str, str]]:
    if not prompt.media:
        return prompt.text
    media: list[dict[str, str]] = [
        {"type": file.kind} for file in prompt.media if not (file.kind == "image" and place and place in prompt.text)
    ]
    return [*media, *([{"type": "text", "text": prompt.text}] if prompt.text else [])]
