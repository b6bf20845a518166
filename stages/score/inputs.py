"""What scores depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from offstage.stages.inference.inputs import InferenceInputs
from offstage.stages.inputs.texts import ScoredText

SCORES = "scores.jsonl"
"""The file that grows as windows finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreInputs(InferenceInputs):
    """The scores depend on the texts and on the windows that they are cut into.

    ``names`` says where each of the ``texts`` stands. ``window`` and ``stride`` are in tokens, ``batch_size`` in
    windows.
    """

    texts: Sequence[ScoredText]
    names: Sequence[str] = field(compare=False)
    window: int
    stride: int
    batch_size: int
