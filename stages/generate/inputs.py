"""What a generation depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stages.generate.prompts import Prompt


@dataclass(frozen=True, slots=True)
class GenerateInputs:
    """The tokens depend on the model, the prompts and every option; the metrics on the placement too.

    ``skeleton``, ``weights`` and ``placement`` are the hashes and the key of what earlier stages left; ``options`` are
    those of the config but for the prompts; ``text`` has the hashes of the files that say how text becomes tokens and
    which options are the default; ``model`` is the config's node of that name.
    """

    skeleton: str
    weights: str
    placement: str
    prompts: Sequence[Prompt]
    options: Mapping[str, Any]
    seed: int
    trace: bool
    text: Mapping[str, str]
    libraries: Mapping[str, str]
    model: Mapping[str, Any] = field(compare=False)
