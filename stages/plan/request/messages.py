"""The messages of a chat: who says what, as text or as a list of texts, images and recordings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from offstage.pipeline.errors import ConfigError
from offstage.stages.inputs.line_file import is_text
from offstage.stages.inputs.media_files import KINDS, MediaFile, MediaKind

Message = dict[str, Any]
"""``{role: …, content: …}``: the content is text, or a list of ``{type: text, text: …}``, ``{type: image}`` and
``{type: audio}``, in whose places the media of the prompt belong, in their order."""

Take = Callable[[str, MediaKind, object], MediaFile]
"""Returns the file of one part of a message: from where it stands, its kind, and its path (null: none is named)."""


def read_messages(name: str, value: Any, take: Take) -> tuple[list[Message], list[MediaFile]]:
    """Return the messages that ``value`` is, and the media that stand in them, in order; else a ``ConfigError``."""
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        raise ConfigError(
            f"{name}: {value!r} is no list of messages; each is {{role: …, content: …}}, the content text or a list of "
            "{type: text, text: …} and {type: image, path: …}"
        )
    media: list[MediaFile] = []
    messages = [dict(message) for message in value]
    for index, message in enumerate(messages):
        if not isinstance(message["content"], str):
            parts = list(_parts(f"{name}[{index}].content", message["content"], take))
            message["content"] = [part for part, _ in parts]
            media += [file for _, file in parts if file is not None]
    return messages, media


def text_of(message: Message) -> str:
    """Return all text of ``message``."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or set(value) != {"role", "content"} or not is_text(value["role"]):
        return False
    content = value["content"]
    return is_text(content) or (isinstance(content, list) and bool(content))


def _parts(name: str, content: list[Any], take: Take) -> Iterator[tuple[dict[str, str], MediaFile | None]]:
    """Yield each part of a message's content, without its path, and the file that belongs there."""
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and set(part) == {"type", "text"} and is_text(part["text"]):
            yield {"type": "text", "text": part["text"]}, None
        elif kind in KINDS and set(part) <= {"type", "path"}:
            yield {"type": kind}, take(f"{name}[{index}]", kind, part.get("path"))
        else:
            raise ConfigError(
                f"{name}[{index}]: {part!r} is no part of a message; give {{type: text, text: …}}, "
                "{type: image, path: …} or {type: audio, path: …}: nothing is fetched, and videos aren't served"
            )
