"""What a model is asked: prompts from the config, or from a file of text or JSON lines.

A prompt is text, the messages of a chat, or token ids; images and recordings may stand beside its text, or in messages.
As a mapping it may bring options of its own, by the names that ``generate`` has for all. They are read here, below the
stage that answers them, since a plan leaves room for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from offstage.pipeline.errors import ConfigError, Fault, closest
from offstage.pipeline.standard_input import SIGN
from offstage.stages.inputs.line_file import LineFile, is_text
from offstage.stages.inputs.media_files import MediaFile
from offstage.stages.plan.request.assistant import KEY as ASSISTANT
from offstage.stages.plan.request.batch_size import AUTO
from offstage.stages.plan.request.lockstep import check_lockstep
from offstage.stages.plan.request.messages import Message, text_of
from offstage.stages.plan.request.prompt_media import MEDIA, find_beside, place_media
from offstage.stages.plan.request.speculation import KEY as SPECULATION, check_speculation

OWN_KEYS = (
    "prompts", "prompts_file", "batch_size", "lockstep", "chat", "system", "exact", "output_logprobs", ASSISTANT,
    SPECULATION,
)  # fmt: skip
"""The keys of ``generate`` that are ours; all others are options of transformers' ``GenerationConfig``."""

MOST = 2**63
"""Token ids and seeds are smaller."""

_CONTENTS = ("prompt", "token_ids", "messages")
_KINDS = "give text, a list of token ids, or a mapping with one of prompt, token_ids and messages"
_FILE = LineFile("generate.prompts_file", "prompt", _KINDS)

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
    def told(self) -> Told:
        """The prompt as a record tells it: its content, with the files that belong to it where there are any."""
        if not self.media:
            return self.content
        kind = "prompt" if isinstance(self.content, str) else "messages"
        files = {key: [asdict(file) for file in self.media if file.kind == MEDIA[key]] for key in MEDIA}
        return {kind: self.content, **{key: listed for key, listed in files.items() if listed}}


def check_prompts(generate: Mapping[str, Any]) -> Iterable[Fault]:
    """Yield what is wrong with the prompts of the config node ``generate``, and with the keys that are ours."""
    size, chat, system = (generate.get(key) for key in ("batch_size", "chat", "system"))
    if size not in (None, AUTO) and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        rule = "give a whole number from 1, auto for what fits, or null for all"
        yield Fault("generate.batch_size", f"{size!r} is no batch size; {rule}")
    yield from check_lockstep(generate)
    yield from check_speculation(generate)
    if chat not in (None, "auto", True, False):
        yield Fault("generate.chat", f"{chat!r} is neither true, false nor auto")
    if system is not None and not is_text(system):
        yield Fault("generate.system", f"{system!r} is no text; give what the system's message says, or null")
    for key in ("exact", "output_logprobs"):
        if generate.get(key) not in (None, True, False):
            yield Fault(f"generate.{key}", f"{generate[key]!r} is neither true nor false")
    try:
        read_prompts(generate)
    except ConfigError as error:
        yield Fault.of(error)


def check_seed(key: str, seed: object) -> Iterable[Fault]:
    """Yield a fault of ``key`` if ``seed`` isn't one."""
    if type(seed) is not int or not 0 <= seed < MOST:
        yield Fault(key, f"{seed!r} is no seed; give a whole number from 0 to 2**63 - 1")


def read_prompts(generate: Mapping[str, Any]) -> dict[str, Prompt]:
    """Return the prompts of the config node ``generate``, each by where it stands: ``generate.prompts[0]``, a line.

    Blank lines of a file are passed over. Where the file is ``-``, ``prompts`` are the lines that were read of standard
    input when the config was resolved. Raises ``ConfigError`` for what is no prompt.
    """
    file, prompts = generate.get("prompts_file"), generate.get("prompts")
    if file is not None:
        folder = Path.cwd() if file == SIGN else Path(str(file)).absolute().parent
        return {name: _prompt(name, given, folder) for name, given in _FILE.read(file, prompts).items()}
    listed = [prompts] if isinstance(prompts, str) and prompts else prompts
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"generate.prompts: {prompts!r} is no list of prompts; give generate.prompts=['…']")
    named = ((f"generate.prompts[{i}]", given) for i, given in enumerate(listed))
    return {name: _prompt(name, given, Path.cwd()) for name, given in named}


def _prompt(name: str, given: Any, folder: Path) -> Prompt:
    """Return what was ``given`` under ``name`` as a prompt; paths in it are relative to ``folder``."""
    if not isinstance(given, Mapping):
        return Prompt(_content(name, given, ("prompt", "token_ids")))
    kinds = [kind for kind in _CONTENTS if kind in given]
    files = [file for key in MEDIA for file in find_beside(f"{name}.{key}", key, given.get(key), folder)]
    if len(kinds) != 1 and (kinds or not files):
        near = "" if kinds else "".join(closest(str(key), (*_CONTENTS, *MEDIA)) for key in list(given)[:1])
        raise ConfigError(f"{name}: {dict(given)!r} has {len(kinds)} of {', '.join(_CONTENTS)}{near}; give one of them")
    options = {str(k): value for k, value in given.items() if k not in (*kinds, *MEDIA) and value is not None}
    mine = [key for key in options if key in OWN_KEYS]
    if mine:
        raise ConfigError(f"{name}: {mine[0]!r} is the same for all prompts; give generate.{mine[0]}")
    if kinds == ["messages"]:
        messages, files = place_media(f"{name}.messages", given["messages"], files, folder)
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
    raise ConfigError(f"{name}: {value!r} is neither text in UTF-8 nor a list of token ids; {_KINDS}")


def is_token_ids(value: Any) -> bool:
    """Return whether ``value`` is a list of token ids, at least one."""
    ids = value if isinstance(value, list) else []
    return bool(ids) and all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < MOST for i in ids)
