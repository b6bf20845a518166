"""Where each layer lay, plan by plan, and devices in the order of the tiers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from offstage.pipeline.metrics import MetricTable
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.run_schema import PlacedLayers


@dataclass(frozen=True, slots=True)
class RunPlacement:
    """One plan: its layers in the order of execution, and the jobs that followed it."""

    jobs: tuple[str, ...]
    layers: tuple[PlacedLayers, ...]

    @property
    def count(self) -> int:
        """How many layers there are."""
        return sum(each.count for each in self.layers)


@dataclass(frozen=True, slots=True)
class Placements:
    """The different plans of some jobs, and how many more of them there were."""

    plans: tuple[RunPlacement, ...]
    left_out: int


def tier(device: str) -> tuple[int, int]:
    """Return a sort key that puts devices in the order of the tiers: accelerators by index, cpu, disk."""
    return (0, int(device)) if device.isdecimal() else (1 if device == "cpu" else 2, 0)


def in_tier_order(devices: Iterable[str]) -> list[str]:
    """Return ``devices`` without repeats, in the order of the tiers."""
    return sorted(set(devices), key=lambda device: (*tier(device), device))


def linked_devices(table: MetricTable, metrics: Iterable[str]) -> list[str]:
    """Return the devices that ``metrics``, by their names, tell links of, in the order of the tiers; none where one is.

    What the only link carries is all that is streamed.
    """
    linked = {metric.name for metric in table.links()}
    parts = (name.partition(".") for name in metrics)
    devices = in_tier_order(device for metric, _, device in parts if device and metric in linked)
    return devices if len(devices) > 1 else []


def device_title(device: str) -> str:
    """Return what a device is called in a legend."""
    return f"accelerator {device}" if device.isdecimal() else device


def placements_of(jobs: Sequence[Job], *, most: int) -> Placements:
    """Return the first ``most`` different plans of ``jobs``."""
    groups: dict[tuple[PlacedLayers, ...], list[str]] = {}
    for job in jobs:
        if job.run.layers:
            groups.setdefault(job.run.layers, []).append(job.name)
    plans = tuple(RunPlacement(tuple(names), layers) for layers, names in groups.items())
    return Placements(plans[:most], len(plans[most:]))
