"""What a generation cost: its seconds, the bytes that streamed for it, how long it waited, and what set its speed.

All of it is measured. Decoding begins when a batch's first token is there; what came before is the prefill, which
runs many positions in one pass and says nothing about the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from stages.dispatch.transfer.carrier import Traffic
from stages.inference.bound import Bound, bound_of
from stages.inference.cost import Metrics
from stages.plan.plan import Plan
from stages.plan.predict import bound_seconds


@dataclass(slots=True)
class Cost:
    """Sums over batches. ``steps`` are forwards after the first token, however many sequences share one.

    The bytes and ``stall_seconds`` are those of decoding alone; ``storage_bytes`` of the streamed ones were read from
    storage for it. So are the calls for experts that wait, ``expert_hits`` of which found theirs in a slot.
    ``cpu_seconds`` are those of all threads while it was decoded. ``first_token_seconds`` has an entry a batch,
    ``token_seconds`` one a token after that: how long it let itself be waited for.
    """

    batches: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    streamed_bytes: int = 0
    storage_bytes: int = 0
    stall_seconds: float = 0.0
    expert_hits: int = 0
    expert_misses: int = 0
    cpu_seconds: float = 0.0
    first_token_seconds: list[float] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)

    def add(
        self, times: Sequence[float], *, began: float, sequences: int, first: Traffic, last: Traffic,
        cpu_seconds: float = 0.0,
    ) -> None:  # fmt: skip
        """Add a batch that ``began`` and had a token of each of its ``sequences`` at each of ``times``.

        ``first`` and ``last`` are what had streamed when the first token had come, and in the end; all threads computed
        for ``cpu_seconds`` between the two.
        """
        self.cpu_seconds += cpu_seconds
        self.first_token_seconds.append(times[0] - began)
        self.token_seconds += [now - before for before, now in pairwise(times)]
        self.batches += 1
        self.prefill_seconds += times[0] - began
        self.decode_seconds += times[-1] - times[0]
        self.steps += len(times) - 1
        self.tokens += (len(times) - 1) * sequences
        self.streamed_bytes += last.streamed_bytes - first.streamed_bytes
        self.storage_bytes += last.storage_bytes - first.storage_bytes
        self.stall_seconds += last.stall_seconds - first.stall_seconds
        self.expert_hits += last.expert_hits - first.expert_hits
        self.expert_misses += last.expert_misses - first.expert_misses

    @property
    def hit_rate(self) -> float | None:
        """How often decoding found its experts in slots; null where it called none that wait."""
        calls = self.expert_hits + self.expert_misses
        return self.expert_hits / calls if calls else None

    def bound(self) -> Bound:
        """Return what decoding waited for."""
        return bound_of(self.decode_seconds, stall_seconds=self.stall_seconds, storage_bytes=self.storage_bytes)

    def bound_seconds(self, plan: Plan) -> float | None:
        """Return the least seconds in which a token's weights could be moved, as they lie under ``plan``."""
        if not self.steps:
            return None
        streamed = max(self.streamed_bytes, self.storage_bytes) / self.steps
        return bound_seconds(plan, streamed_bytes=streamed, storage_bytes=self.storage_bytes / self.steps)

    def metrics(self, plan: Plan) -> Metrics:
        """Return the run record's metrics of decoding under ``plan``, null where no token came after the first."""
        steps, seconds = self.steps, self.decode_seconds
        return {
            "time_to_first_token_seconds": self.prefill_seconds / self.batches if self.batches else None,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds_per_token": seconds / steps if steps else None,
            "decode_cpu_seconds_per_token": self.cpu_seconds / steps if steps else None,
            "decode_tokens_per_second": self.tokens / seconds if steps else None,
            "streamed_bytes_per_token": round(self.streamed_bytes / steps) if steps else None,
            "streamed_bytes_per_second": self.streamed_bytes / seconds if steps else None,
            "stall_seconds_per_token": self.stall_seconds / steps if steps else None,
            "stall_share": self.stall_seconds / seconds if steps and seconds else None,
            "bound": self.bound() if steps else None,
            "bound_seconds_per_token": self.bound_seconds(plan),
            **({} if self.hit_rate is None else {"expert_hit_rate": self.hit_rate}),
        }
