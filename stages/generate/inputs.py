"""What a generation depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

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

    def wherever_it_lies(self) -> Self:
        """Return these without what changes no result; how many prompts go in lockstep doesn't either."""
        options = {name: value for name, value in self.options.items() if name != "lockstep"}
        return replace(InferenceInputs.wherever_it_lies(self), options=options)
