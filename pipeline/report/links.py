"""What is streamed over each link, and what is waited for it: the metrics whose names end in a device.

They are told one by one where there are several links; what the only one carries is all that is streamed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from offstage.pipeline.report.placements import in_tier_order
from offstage.pipeline.report.quantities import Kind


@dataclass(frozen=True, slots=True)
class LinkFigure:
    """A figure of each link: its ``title``, and the ``metric`` that has it under ``metric.device``."""

    title: str
    kind: Kind
    metric: str

    def name(self, device: str) -> str:
        """Return the metric of the link to ``device``."""
        return f"{self.metric}.{device}"


LINK_FIGURES = (
    LinkFigure("a token", "bytes", "link_bytes_per_token"),
    LinkFigure("predicted a token", "bytes", "predicted_link_bytes_per_token"),
    LinkFigure("stalled a token", "seconds", "link_stall_seconds_per_token"),
    LinkFigure("a forward", "bytes", "link_bytes_per_forward"),
    LinkFigure("stalled a forward", "seconds", "link_stall_seconds_per_forward"),
)


def linked_devices(metrics: Iterable[str]) -> list[str]:
    """Return the devices that ``metrics`` have figures of links for, in the order of the tiers; none where one has."""
    known = {figure.metric for figure in LINK_FIGURES}
    parts = (name.partition(".") for name in metrics)
    devices = in_tier_order(device for metric, _, device in parts if metric in known)
    return devices if len(devices) > 1 else []
