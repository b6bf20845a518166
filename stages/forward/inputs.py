"""What the outputs of a forward depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from offstage.stages.calls.options import ForwardOptions
from offstage.stages.inference.inputs import InferenceInputs

OUTPUTS = "outputs.safetensors"
"""The file that has the outputs by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInputs(InferenceInputs):
    """``asked`` is all that is given to the forward and asked of it, files by their content; ``given`` are the options
    that say so. ``media`` are the libraries that decode and resize, by their versions.
    """

    asked: Mapping[str, object]
    media: Mapping[str, str | None]
    given: ForwardOptions = field(compare=False)
