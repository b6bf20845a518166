"""What scores come to: sums, perplexity, bits a byte; and what they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stages.dispatch.transfer.carrier import Traffic
from stages.inference.bound import bound_of


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


class ScoreCost:
    """Sums over the forwards of one run, from what ``traffic`` counts while they go on."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic, self._before = traffic, replace(traffic)
        self._seconds, self._forwards, self._tokens = 0.0, 0, 0

    def add(self, seconds: float, tokens: int) -> None:
        """Add a forward that took so many ``seconds`` and scored so many ``tokens``."""
        self._seconds += seconds
        self._forwards += 1
        self._tokens += tokens

    def metrics(self) -> dict[str, float | int | str | None]:
        """Return the run record's metrics of scoring, null where every window had been scored by an earlier run."""
        seconds, forwards = self._seconds, self._forwards
        streamed = self._traffic.streamed_bytes - self._before.streamed_bytes
        stalled = self._traffic.stall_seconds - self._before.stall_seconds
        stored = self._traffic.storage_bytes - self._before.storage_bytes
        timed = forwards > 0 and seconds > 0
        return {
            "score_seconds": seconds,
            "scored_tokens_per_second": self._tokens / seconds if timed else None,
            "streamed_bytes_per_forward": round(streamed / forwards) if forwards else None,
            "streamed_bytes_per_second": streamed / seconds if timed else None,
            "stall_share": stalled / seconds if timed else None,
            "bound": bound_of(seconds, stall_seconds=stalled, storage_bytes=stored) if forwards else None,
        }
