"""The metrics that stages have in common which ask something of the placed model.

Where the work was measured several times, each is the median of the repeats that count, which the record's section
``repeats`` has one by one: with who had the processor meanwhile (``contended`` where others took a tenth of it or
more), how loaded the machine was, and how fast its storage.
"""

from __future__ import annotations

from offstage.pipeline.metrics import Metric

LOADING = (
    Metric("load_seconds", "seconds", "loading"),
    # What the process held on the host before the first weight was there, a part of every peak: Python, torch,
    # transformers, the skeleton.
    Metric("base_host_bytes", "bytes"),
)
STREAMING = (
    # What set the speed, as measured: ``storage``, ``host-to-device`` or ``compute``.
    Metric("bottleneck", "word", "bottleneck"),
    Metric("streamed_bytes_per_second", "bytes/s", "streaming", aside=True),
    # The part of the time of forwards, or of decoding, in which these waited for weights.
    Metric("stall_share", "share", "stall share"),
)
WHOLE_RUN = (
    Metric("storage_read_bytes", "bytes"),
    # The time that forwards waited for weights.
    Metric("stall_seconds", "seconds"),
    Metric("transfer_stall_seconds", "seconds", per_device=True),
    # What a host sent to the others of the run, in bytes of tensors: hidden states and logits.
    Metric("sent_bytes", "bytes", "sent to other hosts", optional=True),
    # How often an expert that tokens were routed to was in a slot: in decoding alone where there was any. By layer
    # the section ``experts`` has these, with the bytes that were streamed.
    Metric("expert_hit_rate", "share", "expert cache hit rate", optional=True),
    Metric("expert_hits", "count", optional=True),
    Metric("expert_misses", "count", optional=True),
    Metric("expert_evictions", "count", optional=True),
)
REPEATS = (
    Metric("repeats", "count", optional=True),
    Metric("contended_repeats", "count", optional=True),
    Metric("storage_bandwidth_bytes_per_second", "bytes/s", optional=True),
)


def links(unit: str) -> tuple[Metric, ...]:
    """Return what came over each link for a ``unit`` (a token, a forward), and how long that was waited for.

    It is told by the device that computes it: ``transfer_bytes_per_token.0`` crossed the link to accelerator 0;
    ``.cpu`` is what came to the host, as it rests.
    """
    return (
        Metric(f"transfer_bytes_per_{unit}", "bytes", f"a {unit}", per_device=True),
        Metric(f"transfer_stall_seconds_per_{unit}", "seconds", f"stalled a {unit}", per_device=True),
    )


def earlier(units: str) -> Metric:
    """Return how many ``units`` a run before this one had come to, which went on there; its times aren't of them."""
    return Metric(f"earlier_{units}", "count", optional=True)


FORWARDS = (Metric("streamed_bytes_per_forward", "bytes", "streamed a forward"), *STREAMING, *links("forward"))
