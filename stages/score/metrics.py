"""What scores come to: sums, perplexity, bits a byte."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TOLD = (
    "name", "tokens", "log_likelihood", "perplexity", "bits_per_byte", "is_greedy", "batches", "text_sha256",
    "scores_sha256",
)  # fmt: skip
"""What the record has of each text, beside the text itself if it is short."""
_SHORT = 200


@dataclass(frozen=True, slots=True)
class TextScore:
    """The ``tokens`` that were scored and the sum of their log-likelihoods, null where one isn't finite.

    ``bytes`` are those of the text in UTF-8, null where it isn't known.
    """

    tokens: int
    total: float | None
    bytes: int | None = None

    @classmethod
    def of(cls, values: Sequence[float | None], size: int | None) -> TextScore:
        """Return the sum of ``values`` over a text of ``size`` bytes."""
        known = [value for value in values if value is not None]
        return cls(len(values), math.fsum(known) if len(known) == len(values) else None, size)

    @classmethod
    def together(cls, each: Sequence[TextScore]) -> TextScore:
        """Return that of several texts: each token counts the same."""
        totals = [one.total for one in each]
        sizes = [one.bytes for one in each]
        return cls(
            sum(one.tokens for one in each),
            None if None in totals else math.fsum(total for total in totals if total is not None),
            None if None in sizes else sum(size for size in sizes if size is not None),
        )

    @property
    def perplexity(self) -> float | None:
        """The exponential of the mean negative log-likelihood of a token; null where it is beyond all numbers."""
        if self.total is None or not self.tokens:
            return None
        try:
            return math.exp(-self.total / self.tokens)
        except OverflowError:
            return None

    @property
    def bits_per_byte(self) -> float | None:
        """The negative log-likelihood in bits, for each byte of the text."""
        return None if self.total is None or not self.bytes else -self.total / math.log(2) / self.bytes

    def metrics(self) -> dict[str, float | int | None]:
        """Return it by the names that records have."""
        return {
            "tokens": self.tokens,
            "log_likelihood": self.total,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
        }


def told_text(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the record has of a text: its sums, and a hash of its tokens' log-likelihoods."""
    whole = {key: text[key] if len(text[key] or "") <= _SHORT else None for key in ("context", "text")}
    return {**whole, **{key: text[key] for key in _TOLD}}
