"""What a generation cost: its seconds, the bytes that streamed for it, how long it waited, and what set its speed.

All of it is measured. Decoding begins when a batch's first token is there; what came before is the prefill, which
runs many positions in one pass and says nothing about the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from offstage.stages.dispatch.transfer.traffic import Traffic
from offstage.stages.generate.judged import Judged
from offstage.stages.inference.cost import Bottleneck, Metrics, bottleneck_of, link_metrics
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.traffic import lower_bound_seconds


@dataclass(frozen=True, slots=True)
class TimedBatch:
    """A batch from when it ``began`` over its tokens, one of each of its ``sequences`` at each of ``times``.

    ``first`` and ``last`` are what had streamed when the first token had come, and in the end; ``cpu`` the seconds that
    all threads had computed for by then. ``judged`` is what came of guessing tokens, null where none were guessed.
    """

    began: float
    times: Sequence[float]
    sequences: int
    first: Traffic
    last: Traffic
    cpu: tuple[float, float] = (0.0, 0.0)
    judged: Judged | None = None

    @property
    def steps(self) -> int:
        """The forwards after the first token."""
        return len(self.times) - 1


@dataclass(slots=True)
class Cost:
    """Sums over batches. ``steps`` are forwards after the first token, however many sequences share one.

    ``traffic`` is that of decoding alone, and ``cpu_seconds`` are those of all threads meanwhile.
    ``first_token_seconds`` has an entry a batch, ``token_seconds`` one a token after that: how long it let itself be
    waited for. Of batches in lockstep, decoding begins with the first token of all, and what ends with another's first
    is prefill too; they shared ``passes`` of the model. ``judged`` sums up what came of guesses. ``begun_again`` are
    batches that couldn't go on in lockstep.
    """

    batches: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    cpu_seconds: float = 0.0
    passes: int = 0
    begun_again: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    judged: Judged = field(default_factory=Judged)
    first_token_seconds: list[float] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)

    def add(self, *spans: TimedBatch, passes: int = 0) -> None:
        """Add batches that were answered together: one, or several in lockstep, which shared so many ``passes``."""
        if not spans:
            return
        earliest, latest = min(spans, key=lambda span: span.times[0]), max(spans, key=lambda span: span.times[-1])
        self.batches += len(spans)
        judged = [span.judged for span in spans if span.judged is not None]
        for one in judged:
            self.judged.add(one)
        own = sum(one.passes for one in judged)
        self.passes += passes or own
        if passes and judged:  # those of each were those of all
            self.judged.passes += passes - own
        began, ended = earliest.times[0], latest.times[-1]
        beside = _prefill_beside(spans)
        share = 1 - beside / (ended - began) if ended > began else 1
        self.cpu_seconds += (latest.cpu[1] - earliest.cpu[0]) * share
        self.first_token_seconds += [span.times[0] - span.began for span in spans]
        self.token_seconds += [now - before for span in spans for before, now in pairwise(span.times)]
        self.prefill_seconds += began - min(span.began for span in spans) + beside
        self.decode_seconds += ended - began - beside
        self.steps += sum(span.steps for span in spans)
        self.tokens += sum(span.steps * span.sequences for span in spans)
        self.traffic.add(latest.last.since(earliest.first))

    def bottleneck(self) -> Bottleneck:
        """Return what decoding waited for."""
        return bottleneck_of(self.decode_seconds, self.traffic)

    def lower_bound_seconds(self, plan: Plan) -> float | None:
        """Return the least seconds in which a token's weights could be moved, as they lie under ``plan``."""
        if not self.steps:
            return None
        members = max(1.0, self.steps / self.passes) if self.passes else 1.0
        read = self.traffic.storage_bytes * members / self.steps
        streamed = max(self.traffic.streamed_bytes * members / self.steps, read)
        return lower_bound_seconds(plan, streamed_bytes=streamed, storage_bytes=read, members=members)

    def metrics(self, plan: Plan) -> Metrics:
        """Return the run record's metrics of decoding under ``plan``, null where no token came after the first."""
        steps, seconds, traffic = self.steps, self.decode_seconds, self.traffic
        return {
            "time_to_first_token_seconds": sum(self.first_token_seconds) / self.batches if self.batches else None,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds_per_token": seconds / steps if steps else None,
            "decode_cpu_seconds_per_token": self.cpu_seconds / steps if steps else None,
            "decode_tokens_per_second": self.tokens / seconds if steps else None,
            "streamed_bytes_per_token": round(traffic.streamed_bytes / steps) if steps else None,
            "streamed_bytes_per_second": traffic.streamed_bytes / seconds if steps else None,
            "stall_seconds_per_token": traffic.stall_seconds / steps if steps else None,
            "stall_share": traffic.stall_seconds / seconds if steps and seconds else None,
            "bottleneck": self.bottleneck() if steps else None,
            "lower_bound_seconds_per_token": self.lower_bound_seconds(plan),
            **link_metrics(traffic, unit="token", count=steps),
            **({} if traffic.expert_hit_rate is None else {"expert_hit_rate": traffic.expert_hit_rate}),
            **({} if not self.passes else {"passes": self.passes}),
            **({} if not self.begun_again else {"lockstep": 1, "batches_begun_again": self.begun_again}),
            **self.judged.metrics(),
        }


def _prefill_beside(spans: Sequence[TimedBatch]) -> float:
    """Return the seconds after the first token of all of ``spans`` that others took to their own first one.

    Batches in lockstep have their tokens one after another: each is what was worked on since the one before.
    """
    tokens = sorted((time, place == 0) for span in spans for place, time in enumerate(span.times))
    return sum(now - before for (before, _), (now, is_first) in pairwise(tokens) if is_first)
