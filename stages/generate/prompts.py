"""Prompts as token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from offstage.pipeline.errors import ConfigError, Fault, OffstageError, foreign
from offstage.stages.checkpoints.generation_defaults import named_tokens
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.tokenizers import load_tokenizer
from offstage.stages.empty_init.model import read_class
from offstage.stages.inference.tokens import encode_text
from offstage.stages.inputs.generate_options import GenerateOptions
from offstage.stages.inputs.prompt_processor import PromptProcessor
from offstage.stages.inputs.prompts import Prompt, prompt_inputs
from offstage.stages.plan.request.geometry import read_geometry

_TOKENS = "input_ids"
_INSTEAD = "generate.prompts=[[5,6,7]]"


@dataclass(frozen=True, slots=True)
class Encoder:
    """Makes token ids of prompts; ``tokenizer`` is null where the checkpoint has none.

    ``chat`` says whether text is what a user says in a chat: true, false, or auto (where the tokenizer has a template
    for chats). ``system`` is the message that such a chat begins with.
    """

    tokenizer: Any
    chat: bool | Literal["auto"] = "auto"
    system: str | None = None

    @classmethod
    def of(cls, given: GenerateOptions, tokenizer: Any) -> Encoder:
        """Return the encoder that ``given`` options ask for."""
        return cls(tokenizer, given.chat, given.system)

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
        messages = None
        if self.tokenizer is not None:
            messages = prompt.conversation(chat=self.chat, system=self.system, has_template=self._has_template)
        if messages is None:
            return encode_text(name, prompt.text, self.tokenizer, instead=_INSTEAD)
        with foreign(ConfigError, f"{name}: {prompt.text!r} can't be put in the tokenizer's template for chats"):
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return encode_text(name, text, self.tokenizer, instead=_INSTEAD, special=False)


def check_encoded(prompts: Mapping[str, Prompt], given: GenerateOptions, model: Mapping[str, Any]) -> Iterable[Fault]:
    """Yield the first of ``prompts`` that can't be made what the model is given, and those longer than its context.

    What is wrong with the checkpoint or its tokenizer is said by who opens them.
    """
    try:
        if not model.get("path") or not ModelSource.of(model).folder.is_dir():
            return
        needs = any(prompt.token_ids is None and not prompt.media for prompt in prompts.values())
        tokenizer, context = load_tokenizer(ModelSource.of(model)) if needs else None, read_geometry(model).context
        takes_text = _takes_text(model)
    except OffstageError:
        return
    try:
        lengths = dict(_lengths(prompts, Encoder.of(given, tokenizer), given, model))
    except ConfigError as error:
        yield Fault.of(error)
        return
    for name, length in lengths.items():
        if not takes_text and not prompts[name].media:
            yield Fault(name, "the model takes no text alone; give what it sees or hears: {images: […]}, {audio: […]}")
        if 0 < context < length:
            yield Fault(name, f"{length} tokens are more than the model's context of {context}; shorten it")


def _lengths(
    prompts: Mapping[str, Prompt], encoder: Encoder, given: GenerateOptions, model: Mapping[str, Any]
) -> Iterator[tuple[str, int]]:
    """Yield how many tokens each of ``prompts`` has; every image and recording is read for it, one after another."""
    processor = None
    for name, prompt in prompts.items():
        if prompt.media:
            processor = processor or PromptProcessor(ModelSource.of(model), key=name)
            yield name, len(prompt_inputs(name, prompt, processor, given).ids)
        else:
            yield name, len(encoder.encode(name, prompt))


def _takes_text(model: Mapping[str, Any]) -> bool:
    """Return whether text is what the model's class is given first; a module's own code says what it is given."""
    if model.get("kind") != "pretrained":
        return True
    _, kind = read_class(model)
    return getattr(kind, "main_input_name", _TOKENS) == _TOKENS


def token_ids(option: str, value: object) -> list[int]:
    """Return the token ids that an ``option`` names: none, one or a list; a ``ConfigError`` for anything else."""
    ids = named_tokens(value)
    if ids is None:
        raise ConfigError(f"generate.{option}: {value!r} is no token id; give a whole number, or leave it out")
    return ids
