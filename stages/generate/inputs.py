"""What a generation depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offstage.stages.inference.inputs import InferenceInputs
from offstage.stages.inputs.generate_options import GenerateOptions
from offstage.stages.inputs.prompts import Prompt

GENERATIONS = "generations.jsonl"
"""The file that grows as sequences finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateInputs(InferenceInputs):
    """The tokens depend on the prompts and every option too; ``names`` says where each of the ``prompts`` stands.

    ``options`` are those of the config, with the numbers that the plan chose, and without what names files: ``asked``
    has all of them, as they are read. ``decoders`` has the versions of the libraries that read images and recordings,
    where a prompt has some. ``assistant`` is which checkpoint guesses ahead, null where none does.
    """

    prompts: Sequence[Prompt]
    names: Sequence[str] = field(compare=False)
    options: Mapping[str, Any]
    asked: GenerateOptions = field(compare=False)
    seed: int
    decoders: Mapping[str, str | None] = field(default_factory=dict)
    assistant: Mapping[str, object] | None = None
