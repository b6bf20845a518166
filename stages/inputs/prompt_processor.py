"""The processor of a checkpoint: what makes of text, images and recordings what its model takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offstage.pipeline.errors import ConfigError, foreign
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.tokenizers import check_tokenizer
from offstage.stages.inputs.audio import read_audio
from offstage.stages.inputs.images import read_image
from offstage.stages.inputs.media_files import MediaFile, MediaKind
from offstage.stages.inputs.processors import load_processor, sampling_rate

_PARTS: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("image_processor",),
    "audio": ("feature_extractor", "audio_processor"),
}
_TRAINING = ("labels",)
"""What some processors add that is of use to a loss alone."""


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """What a model is given for one prompt: ``ids`` are its tokens, none where it takes no text.

    Its images and recordings took ``decoded_bytes`` before the processor made something of them.

    ``tensors`` has everything by the name that the model's forward has for it, tokens and mask included, each with a
    batch of one prompt.
    """

    ids: list[int]
    tensors: Mapping[str, Any]
    decoded_bytes: int


class PromptProcessor:
    """The processor of the checkpoint of ``source``; ``key`` is what it is wanted for."""

    def __init__(self, source: ModelSource, *, key: str) -> None:
        if source.tokenizer_folder is not None:
            raise ConfigError(
                "model.tokenizer: a prompt with images or audio goes through the checkpoint's own processor, which has "
                "a tokenizer of its own; leave it null"
            )
        self._folder = source.folder
        check_tokenizer(self._folder)
        self._given = load_processor(source, "processor", key=key)

    @property
    def has_template(self) -> bool:
        """Whether it has a template for chats."""
        return bool(getattr(self._given, "chat_template", None))

    @property
    def image_token(self) -> str | None:
        """What stands in a text where an image belongs; null where none is needed."""
        token = getattr(self._given, "image_token", None)
        return None if token is None else str(token)

    def check_takes(self, name: str, kind: MediaKind) -> None:
        """Raise a ``ConfigError`` about ``name`` unless the checkpoint's model takes media of that ``kind``."""
        if self._part(kind) is None:
            what = "images" if kind == "image" else "audio"
            raise ConfigError(
                f"{name}: the checkpoint in {str(self._folder)!r} takes no {what}: it has no processor for that; "
                "give text alone, or another checkpoint"
            )

    def encode(self, name: str, text: str, media: Sequence[MediaFile], *, templated: bool = False) -> ModelInputs:
        """Return what the model is given for ``text`` with ``media``, both in the order in which they belong together.

        ``templated`` says that the text came out of a chat's template: what that begins with isn't put there again.
        Raises ``ConfigError`` about ``name``.
        """
        for kind in {file.kind for file in media}:
            self.check_takes(name, kind)
        call: dict[str, Any] = {"text": text} if text else {}
        decoded = [self._decoded(f"{name}.{file.kind}", file) for file in media]
        images = [one for file, one in zip(media, decoded, strict=True) if file.kind == "image"]
        sounds = [one for file, one in zip(media, decoded, strict=True) if file.kind == "audio"]
        if images:
            call["images"] = [images] if text else images
        if sounds:
            call |= {"audio": sounds, "sampling_rate": self._rate}
        begin = getattr(getattr(self._given, "tokenizer", None), "bos_token", None)
        if templated and begin and text.startswith(begin):
            call["add_special_tokens"] = False
        with foreign(ConfigError, f"{name}: the checkpoint's processor can't take it"):
            encoded = self._given(**call, return_tensors="pt")
        size = sum(3 * one.width * one.height for one in images) + sum(one.nbytes for one in sounds)
        ids, tensors = self._checked(name, text, dict(encoded))
        self._check_places(name, text, len(images), ids)
        return ModelInputs(ids, tensors, size)

    def templated(self, name: str, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of a chat up to where the model's answer begins, with a place for each image and sound."""
        with foreign(ConfigError, f"{name}: it can't be put in the processor's template for chats"):
            return str(self._given.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))

    def _checked(self, name: str, text: str, encoded: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """Return the tokens and all that the processor made, without what is for training; it may drop no text."""
        if text and "input_ids" not in encoded:
            raise ConfigError(f"{name}: the model takes no text beside audio: {text[:80]!r}; leave it out")
        for key in (*_TRAINING, *(key for key, value in encoded.items() if value is None)):
            encoded.pop(key, None)
        ids = [int(token) for token in encoded["input_ids"][0]] if "input_ids" in encoded else []
        return ids, encoded

    def _check_places(self, name: str, text: str, images: int, ids: Sequence[int]) -> None:
        """Refuse a ``text`` with fewer places than ``images``, unless the processor has put some before it on its own.

        Newer processors of transformers see to that; to older ones it is the model that would fail.
        """
        place, number = self.image_token, getattr(self._given, "image_token_id", None)
        places = text.count(place) if place else images
        if places < images and (places or number not in (None, *ids)):
            raise ConfigError(
                f"{name}: the text has a place for {places} of {images} images; write {place} where each belongs"
            )

    def _decoded(self, name: str, file: MediaFile) -> Any:
        if file.kind == "image":
            return read_image(name, Path(file.path), sha256=file.sha256)
        samples, longest = read_audio(name, Path(file.path), rate=self._rate, sha256=file.sha256), self._longest
        if longest is not None and len(samples) > longest:
            seconds, most = len(samples) / self._rate, longest / self._rate
            raise ConfigError(
                f"{name}: {file.path!r} lasts {seconds:.1f} s, and the model hears {most:g} s at once; cut it"
            )
        return samples

    def _part(self, kind: MediaKind) -> Any:
        return next((part for name in _PARTS[kind] if (part := getattr(self._given, name, None)) is not None), None)

    @property
    def _rate(self) -> int:
        return sampling_rate(self._part("audio"))

    @property
    def _longest(self) -> int | None:
        """How many samples the model hears at once; the processor would drop what is beyond without a word."""
        samples = getattr(self._part("audio"), "n_samples", None)
        return samples if isinstance(samples, int) else None
