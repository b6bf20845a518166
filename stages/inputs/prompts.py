"""What a model is asked: prompts from the config, or from a file of text or JSON lines.

A prompt is text, the messages of a chat, or token ids; images and recordings may stand beside its text, or in messages.
As a mapping it may bring options of its own, by the names that ``generate`` has for all. They are read here, below the
stage that answers them, since a plan leaves room for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offstage.pipeline.errors import ConfigError, Fault, closest
from offstage.pipeline.regular_files import SIGN
from offstage.stages.inputs.generate_options import OWN_KEYS, GenerateOptions
from offstage.stages.inputs.line_file import LineFile, is_text
from offstage.stages.inputs.media_files import KINDS, MediaFile, MediaKind, find_media

if TYPE_CHECKING:
    from offstage.stages.inputs.prompt_processor import ModelInputs, PromptProcessor

MOST = 2**63
"""Token ids and seeds are smaller."""

MEDIA: Mapping[str, MediaKind] = {"images": "image", "audio": "audio"}
"""What may stand beside text: lists of paths."""

_CONTENTS = ("prompt", "token_ids", "messages")
_RULE = "give text, a list of token ids, or a mapping with one of prompt, token_ids and messages"
_FILE = LineFile("generate.prompts_file", "prompt", _RULE)

Message = dict[str, Any]
"""``{role: …, content: …}``: the content is text, or a list of ``{type: text, text: …}``, ``{type: image}`` and
``{type: audio}``, in whose places the media of the prompt belong, in their order."""

Content = str | list[int] | list[Message]
Told = Content | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked, and the ``options`` that are its own: of the ``GenerationConfig``, or a ``seed``.

    ``media`` are the images and recordings of text or messages, in the order of their places; text may be empty then.
    """

    content: Content
    options: Mapping[str, Any] = field(default_factory=dict)
    media: tuple[MediaFile, ...] = ()

    @property
    def messages(self) -> list[Message] | None:
        """The messages of a chat, null if this isn't one."""
        return [one for one in self.content if isinstance(one, dict)] or None

    @property
    def token_ids(self) -> list[int] | None:
        """The token ids, null if these must be made of text."""
        given = [] if isinstance(self.content, str) else self.content
        return [one for one in given if isinstance(one, int)] or None

    @property
    def text(self) -> str:
        """The text, all messages of a chat together; empty if token ids were given."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(map(text_of, self.messages or ()))

    @property
    def recorded(self) -> Told:
        """The prompt as a record tells it: its content, with the files that belong to it where there are any."""
        if not self.media:
            return self.content
        kind = "prompt" if isinstance(self.content, str) else "messages"
        files = {key: [asdict(file) for file in self.media if file.kind == MEDIA[key]] for key in MEDIA}
        return {kind: self.content, **{key: listed for key, listed in files.items() if listed}}

    def conversation(
        self, *, chat: bool | Literal["auto"], system: str | None, has_template: bool, place: str | None = None
    ) -> list[Message] | None:
        """Return the chat that this is or begins, as the keys of ``generate`` ask; null if it is text to go on with.

        Its media stand before its text, unless the text itself has their ``place``. Raises ``ConfigError`` where there
        is no template for chats.
        """
        given = self.messages
        if (given is not None or chat is True) and not has_template:
            raise ConfigError(
                "generate.chat: the tokenizer has no template for chats; give text and generate.chat=false, "
                "or set model.tokenizer to a folder whose tokenizer has one"
            )
        if given is None and (chat is False or not has_template):
            return None
        messages = [{"role": "user", "content": self._said(place)}] if given is None else given
        if system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": [_text_part(system)] if self.media else system}, *messages]

    def _said(self, place: str | None) -> str | list[dict[str, str]]:
        """Return the content of the message that a user says with this."""
        if not self.media:
            return self.text
        placed = bool(place) and str(place) in self.text
        kinds: list[str] = [file.kind for file in self.media if not (file.kind == "image" and placed)]
        return [*({"type": kind} for kind in kinds), *([_text_part(self.text)] if self.text else [])]


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def text_of(message: Message) -> str:
    """Return all text of ``message``."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


def prompt_inputs(name: str, prompt: Prompt, processor: PromptProcessor, given: GenerateOptions) -> ModelInputs:
    """Return what the model is given for ``prompt``, which stands at ``name``: by the chat's template, the processor.

    Raises ``ConfigError`` where the processor takes no such media, or a file holds none.
    """
    messages = prompt.conversation(
        chat=given.chat, system=given.system, has_template=processor.has_template, place=processor.image_token
    )
    if messages is None:
        return processor.encode(name, prompt.text, prompt.media)
    return processor.encode(name, processor.templated(name, messages), prompt.media, templated=True)


def check_prompts(given: GenerateOptions) -> Iterator[Fault]:
    """Yield what is wrong with the prompts that are ``given``, and what of our keys doesn't go together."""
    yield from given.faults()
    try:
        read_prompts(given)
    except ConfigError as error:
        yield Fault.of(error)


def check_seed(key: str, seed: object) -> Iterator[Fault]:
    """Yield a fault of ``key`` if ``seed`` isn't one."""
    if type(seed) is not int or not 0 <= seed < MOST:
        yield Fault(key, f"{seed!r} is no seed; give a whole number from 0 to 2**63 - 1")


def read_prompts(given: GenerateOptions) -> dict[str, Prompt]:
    """Return the prompts that are ``given``, each by where it stands: ``generate.prompts[0]``, a line.

    Blank lines of a file are passed over. Where the file is ``-``, ``prompts`` are the lines that were read of standard
    input when the config was resolved. Raises ``ConfigError`` for what is no prompt.
    """
    file, prompts = given.prompts_file, given.prompts
    if file is not None:
        folder = Path.cwd() if file == SIGN else Path(file).absolute().parent
        return {name: _prompt(name, one, folder) for name, one in _FILE.read(file, prompts).items()}
    listed = [prompts] if isinstance(prompts, str) and prompts else prompts
    if not isinstance(listed, list) or not listed:
        rows = hasattr(prompts, "tolist")
        what = f"a {type(prompts).__name__}" if rows else repr(prompts)
        way = "each one's token ids as a list, without padding" if rows else "generate.prompts=['…']"
        raise ConfigError(f"generate.prompts: {what} is no list of prompts; give {way}")
    named = ((f"generate.prompts[{index}]", one) for index, one in enumerate(listed))
    return {name: _prompt(name, one, Path.cwd()) for name, one in named}


def _prompt(name: str, given: Any, folder: Path) -> Prompt:
    """Return what was ``given`` under ``name`` as a prompt; paths in it are relative to ``folder``."""
    if not isinstance(given, Mapping):
        return Prompt(_content(name, given, ("prompt", "token_ids")))
    kinds = [kind for kind in _CONTENTS if kind in given]
    files = [file for key in MEDIA for file in _files_beside(f"{name}.{key}", key, given.get(key), folder)]
    if len(kinds) != 1 and (kinds or not files):
        near = "" if kinds else "".join(closest(str(key), (*_CONTENTS, *MEDIA)) for key in list(given)[:1])
        raise ConfigError(f"{name}: {dict(given)!r} has {len(kinds)} of {', '.join(_CONTENTS)}{near}; give one of them")
    options = {str(k): value for k, value in given.items() if k not in (*kinds, *MEDIA) and value is not None}
    mine = [key for key in options if key in OWN_KEYS]
    if mine:
        raise ConfigError(f"{name}: {mine[0]!r} is the same for all prompts; give generate.{mine[0]}")
    if kinds == ["messages"]:
        messages, files = _messages(f"{name}.messages", given["messages"], files, folder)
        return Prompt(messages, options, tuple(files))
    if kinds == ["token_ids"] and files:
        raise ConfigError(
            f"{name}: images and audio stand beside text, not beside token_ids; give a prompt or messages"
        )
    return Prompt(_content(f"{name}.{kinds[0]}", given[kinds[0]], kinds) if kinds else "", options, tuple(files))


def _content(name: str, value: Any, kinds: Sequence[str]) -> Content:
    """Return ``value`` if it is of one of the ``kinds``."""
    if "prompt" in kinds and is_text(value):
        return str(value)
    if "token_ids" in kinds and is_token_ids(value):
        return list(value)
    if value in ("", []):
        raise ConfigError(f"{name}: {value!r} is empty; give a text, or token ids")
    raise ConfigError(f"{name}: {value!r} is neither text in UTF-8 nor a list of token ids; {_RULE}")


def is_token_ids(value: Any) -> bool:
    """Return whether ``value`` is a list of token ids, at least one."""
    ids = value if isinstance(value, list) else []
    return bool(ids) and all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < MOST for i in ids)


def _files_beside(name: str, key: str, given: Any, folder: Path) -> list[MediaFile]:
    """Return the files that are ``given`` as a list of paths, or as one path."""
    listed = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(listed, list):
        raise ConfigError(f"{name}: {given!r} is no list of paths; give [PATH, …]")
    return [find_media(f"{name}[{index}]", MEDIA[key], path, folder) for index, path in enumerate(listed)]


def _messages(
    name: str, value: Any, beside: Sequence[MediaFile], folder: Path
) -> tuple[list[Message], list[MediaFile]]:
    """Return the messages in ``value``, and the files of their parts; those ``beside`` them go where no path stands."""
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        raise ConfigError(
            f"{name}: {value!r} is no list of messages; each is {{role: …, content: …}}, the content text or a list of "
            "{type: text, text: …} and {type: image, path: …}"
        )
    waiting, media = list(beside), list[MediaFile]()
    messages = [dict(message) for message in value]
    for index, message in enumerate(messages):
        if not isinstance(message["content"], str):
            named = ((f"{name}[{index}].content[{place}]", part) for place, part in enumerate(message["content"]))
            parts = [_part(place, part, waiting, folder) for place, part in named]
            message["content"] = [part for part, _ in parts]
            media += [file for _, file in parts if file is not None]
    if waiting:
        raise ConfigError(f"{name}: no part of them is for {waiting[0].path!r}; put {{type: {waiting[0].kind}}} there")
    return messages, media


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or set(value) != {"role", "content"} or not is_text(value["role"]):
        return False
    content = value["content"]
    return is_text(content) or (isinstance(content, list) and bool(content))


def _part(name: str, part: Any, waiting: list[MediaFile], folder: Path) -> tuple[dict[str, str], MediaFile | None]:
    """Return a part of a message, without its path, and the file that belongs there, taken from those ``waiting``."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and set(part) == {"type", "text"} and is_text(part["text"]):
        return _text_part(part["text"]), None
    if kind not in KINDS or not set(part) <= {"type", "path"}:
        raise ConfigError(
            f"{name}: {part!r} is no part of a message; give {{type: text, text: …}}, "
            "{type: image, path: …} or {type: audio, path: …}: nothing is fetched, and videos aren't served"
        )
    if part.get("path") is not None:
        return {"type": kind}, find_media(f"{name}.path", kind, part["path"], folder)
    file = next((file for file in waiting if file.kind == kind), None)
    if file is None:
        raise ConfigError(f"{name}: no file for this {kind}; give its path here, or list it beside the messages")
    waiting.remove(file)
    return {"type": kind}, file


def with_media(prompts: Any, change: Callable[[str], str]) -> Any:
    """Return ``prompts``, as the config gives them, with each path of images and audio as ``change`` has it."""
    if isinstance(prompts, list):
        return [with_media(one, change) for one in prompts]
    if not isinstance(prompts, Mapping):
        return prompts
    keys = (*MEDIA, "path")
    return {key: _changed(one, change) if key in keys else with_media(one, change) for key, one in prompts.items()}


def _changed(given: Any, change: Callable[[str], str]) -> Any:
    """Return a path, or a list of some, as ``change`` has them; what is none stays as it is, to be reported."""
    if isinstance(given, list):
        return [_changed(path, change) for path in given]
    return change(given) if isinstance(given, str) and given else given
