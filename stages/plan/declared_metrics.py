"""The metrics of a plan: what it predicts of a token, and what it chose."""

from __future__ import annotations

from dataclasses import replace

from offstage.pipeline.metrics import Metric, Unit

PREDICTED = "predicted_"
"""What the name of each figure of a plan's forecast begins with in a record."""


def _predicted(name: str, unit: Unit, title: str = "", of: str = "") -> Metric:
    return Metric(f"{PREDICTED}{name}", unit, title, kind="predicted", of=of, optional=True)


LINK_BYTES = replace(
    _predicted("transfer_bytes_per_token", "bytes", "a token", of="transfer_bytes_per_token"), per_device=True
)
PLAN_METRICS = (
    _predicted("seconds_per_token", "seconds", "time a token", of="decode_seconds_per_token"),
    _predicted("bottleneck", "word", "bottleneck", of="bottleneck"),
    _predicted("streamed_bytes_per_token", "bytes", "streamed a token", of="streamed_bytes_per_token"),
    _predicted("quantised_bytes_per_token", "bytes"),
    _predicted("dequantised_bytes_per_token", "bytes"),
    _predicted("multiplied_bytes_per_token", "bytes"),
    _predicted("device_dequantised_bytes_per_token", "bytes"),
    _predicted("device_moved_bytes_per_token", "bytes"),
    _predicted("expert_bytes_per_token", "bytes"),
    # It assumes uniform routing: that all experts are wanted alike.
    _predicted("expert_hit_rate", "share", "expert cache hit rate", of="expert_hit_rate"),
    # What comes of a cache on the host, half-way through the answers.
    _predicted("cache_bytes_per_token", "bytes"),
    _predicted("host_read_bytes_per_token", "bytes"),
    _predicted("crossing_bytes_per_token", "bytes"),
    _predicted("crossings_per_token", "count"),
    _predicted("forwards_for_free", "number"),
    _predicted("storage_bandwidth_bytes_per_second", "bytes/s"),
    LINK_BYTES,
    Metric("host_layers", "count", "layers on the host", kind="predicted", optional=True),
    Metric("simulated_accelerators", "count", kind="predicted", optional=True),
    Metric("batch_size", "count", kind="predicted", optional=True),
    # How many batches share each pass. A generation that couldn't go on so says that it was one.
    Metric("lockstep", "count", kind="predicted", optional=True),
)
