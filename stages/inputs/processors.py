"""The processors of a checkpoint: what makes a model's inputs of images, of audio, and of both with text."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Literal

from offstage.pipeline.errors import ConfigError, foreign
from offstage.stages.checkpoints.bounds import bounded
from offstage.stages.checkpoints.model_source import ModelSource

Kind = Literal["image processor", "feature extractor", "processor"]

_CLASSES: Mapping[Kind, tuple[str, str]] = {
    "image processor": ("image_processing_auto", "AutoImageProcessor"),
    "feature extractor": ("feature_extraction_auto", "AutoFeatureExtractor"),
    "processor": ("processing_auto", "AutoProcessor"),
}
"""By each kind its class, and the module where that is: what ``import transformers`` offers as ``AutoImageProcessor``
wants torchvision in transformers 5.17, which the class itself doesn't."""


def load_processor(source: ModelSource, kind: Kind, *, key: str) -> Any:
    """Return the checkpoint's own processor of that ``kind``, for ``source``; only its files are read.

    A ``ConfigError`` that begins with ``key``, what it is wanted for, where the folder has none that loads. Code of
    the checkpoint's runs only where ``model.trust_remote_code`` says so.
    """
    module, name = _CLASSES[kind]
    folder = source.folder
    about = f"{key}: {str(folder)!r} holds no {kind} that loads"
    with foreign(ConfigError, about, advice="; save the model's own there"), bounded(str(folder)):
        return getattr(import_module(f"transformers.models.auto.{module}"), name).from_pretrained(
            folder, trust_remote_code=source.trust_remote_code, local_files_only=True
        )


def sampling_rate(extractor: Any) -> int:
    """Return how many samples a second of sound has for a feature ``extractor``, in Hz.

    Where it doesn't say so, or is null, that is 16000: nearly all models of speech were trained at it.
    """
    return int(getattr(extractor, "sampling_rate", 16000))
