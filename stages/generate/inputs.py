"""What a generation depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stages.plan.prompts import Prompt


@dataclass(frozen=True, slots=True)
class GenerateInputs:
    """The tokens depend on the model, the prompts and every option; the metrics on the placement too.

    ``skeleton`` and ``weights`` are the keys of what earlier stages left, so of all that made it, the model's code too;
    ``placement`` is the hash of the dispatch plan. ``names`` says where each of the ``prompts`` stands. ``options`` are
    those of the config but for the prompts; ``text``
    has the hashes of the files that say how text becomes tokens and which options are the default, and ``kernels`` the
    variables of the environment that choose kernels; ``model`` is the config's node of that name.
    """

    skeleton: str
    weights: str
    placement: str
    prompts: Sequence[Prompt]
    names: Sequence[str] = field(compare=False)
    options: Mapping[str, Any]
    seed: int
    trace: bool
    text: Mapping[str, object]
    libraries: Mapping[str, str]
    kernels: Mapping[str, str]
    model: Mapping[str, Any] = field(compare=False)
