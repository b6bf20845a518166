"""The metrics of a generation. Those of a token or a second are of decoding alone: what comes after the first token."""

from __future__ import annotations

from offstage.pipeline.metrics import Metric
from offstage.stages.inference.declared_metrics import LOADING, REPEATS, STREAMING, WHOLE_RUN, earlier, links
from offstage.stages.inference.repeats import PERCENTILES

FIRST_TOKEN, BETWEEN_TOKENS = "time_to_first_token_seconds", "time_between_tokens_seconds"
SECONDS = "decode_seconds_per_token"
_SHOWN = 90
"""The percentile that tables have."""

GENERATE_METRICS = (
    *LOADING,
    # A batch's mean, from its prompts to the first token.
    Metric(FIRST_TOKEN, "seconds", "time to first token"),
    Metric("prefill_seconds", "seconds"),
    Metric(SECONDS, "seconds", "time a token", leads=True),
    # The least that a token could have taken: what was moved for it, at the rates that were measured of this machine.
    Metric("lower_bound_seconds_per_token", "seconds", "time a token", kind="lower_bound", of=SECONDS),
    *(Metric(f"{FIRST_TOKEN}_p{percent}", "seconds", optional=True) for percent in PERCENTILES),
    *(
        Metric(
            f"{BETWEEN_TOKENS}_p{percent}",
            "seconds",
            f"between tokens, p{percent}" if percent == _SHOWN else "",
            aside=True,
            optional=True,
        )
        for percent in PERCENTILES
    ),
    Metric("decode_tokens_per_second", "tokens/s", "speed"),
    # Of all threads.
    Metric("decode_cpu_seconds_per_token", "seconds", optional=True),
    Metric("streamed_bytes_per_token", "bytes", "streamed a token"),
    *STREAMING,
    Metric("stall_seconds_per_token", "seconds", "stalled a token", aside=True),
    Metric("passes", "count", "passes", optional=True),
    Metric("batches_begun_again", "count", optional=True),
    Metric("speculation", "word", "drafts verified", optional=True),
    Metric("tokens_per_pass", "number", "tokens a pass", optional=True),
    Metric("drafted_tokens", "count", optional=True),
    Metric("accepted_tokens", "count", optional=True),
    Metric("draft_acceptance", "share", "drafts accepted", optional=True),
    *links("token"),
    *WHOLE_RUN,
    *REPEATS,
    earlier("prompts"),
)
