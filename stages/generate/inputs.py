"""What a generation depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offstage.stages.inference.inputs import InferenceInputs
from offstage.stages.plan.request.prompts import Prompt

GENERATIONS = "generations.jsonl"
"""The file that grows as sequences finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateInputs(InferenceInputs):
    """The tokens depend on the prompts and every option too; ``names`` says where each of the ``prompts`` stands.

    ``options`` are those of the config but for the prompts. ``decoders`` has the versions of the libraries that read
    images and recordings, where a prompt has some. ``assistant`` is which checkpoint guesses ahead, null where none
    does, and lies at ``assistant_path``.
    """

    prompts: Sequence[Prompt]
    names: Sequence[str] = field(compare=False)
    options: Mapping[str, Any]
    seed: int
    decoders: Mapping[str, str | None] = field(default_factory=dict)
    assistant: Mapping[str, object] | None = None
    assistant_path: str | None = field(default=None, compare=False)
