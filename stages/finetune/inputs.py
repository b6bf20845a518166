"""What tuned weights depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from offstage.stages.inference.inputs import InferenceInputs
from offstage.stages.inputs.finetune_options import FinetuneOptions

STEPS = "steps.jsonl"
"""The file that grows by a line a step."""

STATE = ".state"
"""The folder with what is gone on with after a kill."""

CHECKPOINT = "checkpoint"
"""The folder with the tuned weights: of a model, or of an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneInputs(InferenceInputs):
    """The weights depend on the text, by the hash of its bytes, and on the ``recipe``: all options but where the text
    lies and how often the state is saved. ``window`` is in tokens. Metrics depend on the ``offload_ratio``, the plan's.
    """

    corpus: str
    recipe: Mapping[str, object]
    window: int
    offload_ratio: float
    content: str = field(compare=False)
    options: FinetuneOptions = field(compare=False)
