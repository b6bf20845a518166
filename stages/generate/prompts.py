"""Prompts as token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import ConfigError, Fault, OffstageError
from stages.checkpoints.hub import checkpoint_folder
from stages.checkpoints.tokenizers import load_tokenizer, tokenizing
from stages.inference.tokens import encode_text
from stages.plan.geometry import read_geometry
from stages.plan.prompts import MOST, Message, Prompt

_INSTEAD = "generate.prompts=[[5,6,7]]"


@dataclass(frozen=True, slots=True)
class Encoder:
    """Makes token ids of prompts; ``tokenizer`` is null where the checkpoint has none.

    ``chat`` says whether text is what a user says in a chat: true, false, or auto (where the tokenizer has a template
    for chats). ``system`` is the message that such a chat begins with.
    """

    tokenizer: Any
    chat: bool | str = "auto"
    system: str | None = None

    @classmethod
    def of(cls, generate: Mapping[str, Any], tokenizer: Any) -> Encoder:
        """Return the encoder that the config node ``generate`` asks for."""
        chat = generate.get("chat")
        return cls(tokenizer, "auto" if chat is None else chat, generate.get("system"))

    @property
    def is_chat(self) -> bool:
        """Whether text is what a user says in a chat."""
        return self.chat is not False and self._has_template

    @property
    def _has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def encode(self, name: str, prompt: Prompt) -> list[int]:
        """Return the token ids of ``prompt``, which stands at ``name``, or raise ``ConfigError``."""
        if prompt.token_ids is not None:
            return prompt.token_ids
        messages = None if self.tokenizer is None else self._messages(prompt)
        if messages is None:
            return encode_text(name, prompt.text, self.tokenizer, instead=_INSTEAD)
        with tokenizing(ConfigError, f"{name}: {prompt.text!r} can't be put in the tokenizer's template for chats"):
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return encode_text(name, text, self.tokenizer, instead=_INSTEAD, special=False)

    def _messages(self, prompt: Prompt) -> list[Message] | None:
        """Return the chat that ``prompt`` is or begins, null if it is text to go on with."""
        given = prompt.messages
        if (given is not None or self.chat is True) and not self._has_template:
            raise ConfigError(
                "generate.chat: the tokenizer has no template for chats; give text and generate.chat=false, "
                "or set model.tokenizer to a folder whose tokenizer has one"
            )
        if given is None and not self.is_chat:
            return None
        messages = [{"role": "user", "content": prompt.text}] if given is None else given
        opens = messages[0]["role"] == "system" or self.system is None
        return messages if opens else [{"role": "system", "content": self.system or ""}, *messages]


def check_encoded(
    prompts: Mapping[str, Prompt], generate: Mapping[str, Any], model: Mapping[str, Any]
) -> Iterable[Fault]:
    """Yield the first of ``prompts`` that can't be made tokens, and those that are longer than the model's context.

    What is wrong with the checkpoint or its tokenizer is said by who opens them.
    """
    try:
        if not model.get("path") or not checkpoint_folder(model).is_dir():
            return
        needs = any(prompt.token_ids is None for prompt in prompts.values())
        tokenizer, context = load_tokenizer(model) if needs else None, read_geometry(model).context
    except OffstageError:
        return
    try:
        encoder = Encoder.of(generate, tokenizer)
        lengths = {name: len(encoder.encode(name, prompt)) for name, prompt in prompts.items()}
    except ConfigError as error:
        key, _, message = str(error).partition(": ")
        yield Fault(key, message)
        return
    for name, length in lengths.items():
        if 0 < context < length:
            yield Fault(name, f"{length} tokens are more than the model's context of {context}; shorten it")


def token_ids(option: str, value: object) -> list[int]:
    """Return the token ids that an ``option`` names: none, one or a list; a ``ConfigError`` for anything else."""
    found = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and abs(token) < MOST for token in found):
        raise ConfigError(f"generate.{option}: {value!r} is no token id; give a whole number, or leave it out")
    return list(found)
