"""The images and recordings of a prompt: those listed beside its text or messages, and those in the messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.typed_config import absolute
from offstage.stages.inputs.media_files import MediaFile, MediaKind, find_media
from offstage.stages.plan.request.messages import Message, read_messages

MEDIA: Mapping[str, MediaKind] = {"images": "image", "audio": "audio"}
"""What may stand beside text: lists of paths."""


def find_beside(name: str, key: str, given: Any, folder: Path) -> list[MediaFile]:
    """Return the files that are ``given`` as a list of paths, or as one path."""
    listed = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(listed, list):
        raise ConfigError(f"{name}: {given!r} is no list of paths; give [PATH, …]")
    return [find_media(f"{name}[{index}]", MEDIA[key], path, folder) for index, path in enumerate(listed)]


def place_media(
    name: str, value: Any, beside: Sequence[MediaFile], folder: Path
) -> tuple[list[Message], list[MediaFile]]:
    """Return the messages in ``value``, and the files of their parts; those ``beside`` them go where no path stands."""
    waiting = list(beside)

    def take(place: str, kind: MediaKind, path: object) -> MediaFile:
        if path is not None:
            return find_media(f"{place}.path", kind, path, folder)
        file = next((file for file in waiting if file.kind == kind), None)
        if file is None:
            raise ConfigError(f"{place}: no file for this {kind}; give its path here, or list it beside the messages")
        waiting.remove(file)
        return file

    messages, media = read_messages(name, value, take)
    if waiting:
        raise ConfigError(f"{name}: no part of them is for {waiting[0].path!r}; put {{type: {waiting[0].kind}}} there")
    return messages, media


def located_prompts(prompts: Sequence[Any]) -> list[Any]:
    """Return ``prompts``, as the config gives them, with the paths of images and audio absolute."""
    return [_located(prompt) if isinstance(prompt, Mapping) else prompt for prompt in prompts]


def _located(prompt: Mapping[str, Any]) -> dict[str, Any]:
    beside = {key: _absolute(prompt[key]) for key in MEDIA if key in prompt}
    messages = prompt.get("messages")
    if isinstance(messages, list):
        beside["messages"] = [_with_paths(message) for message in messages]
    return {**prompt, **beside}


def _with_paths(message: Any) -> Any:
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, list):
        return message
    found = [
        {**part, "path": _absolute(part["path"])} if isinstance(part, Mapping) and "path" in part else part
        for part in parts
    ]
    return {**message, "content": found}


def _absolute(given: Any) -> Any:
    """Return a path, or a list of some, as absolute ones; what is none stays as it is, to be reported."""
    if isinstance(given, list):
        return [_absolute(path) for path in given]
    return absolute(given) if isinstance(given, str) and given else given
