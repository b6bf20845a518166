"""What came of guessing tokens ahead, as the run record tells it."""

from __future__ import annotations

from dataclasses import dataclass

from offstage.stages.inference.cost import Metrics
from offstage.stages.inputs.generate_options import BATCHED, EXACT


@dataclass(slots=True)
class Judged:
    """The ``passes`` of the model, the ``tokens`` that they gave, the guesses made and ``accepted``.

    Of guesses that transformers itself makes and judges (not ``is_exact``) only what they came to is known.
    """

    passes: int = 0
    tokens: int = 0
    guessed: int = 0
    accepted: int = 0
    is_exact: bool = True

    def add(self, other: Judged) -> None:
        """Add what came of ``other`` guesses."""
        self.passes += other.passes
        self.tokens += other.tokens
        self.guessed += other.guessed
        self.accepted += other.accepted
        self.is_exact = other.is_exact

    def metrics(self) -> Metrics:
        """Return the run record's metrics of guessing; none where there were no passes for it."""
        if not self.passes:
            return {}
        metrics: Metrics = {"speculation": EXACT if self.is_exact else BATCHED}
        metrics["tokens_per_pass"] = self.tokens / self.passes
        if self.is_exact:
            metrics |= {"drafted_tokens": self.guessed, "accepted_tokens": self.accepted}
        return metrics | ({"draft_acceptance": self.accepted / self.guessed} if self.guessed else {})
