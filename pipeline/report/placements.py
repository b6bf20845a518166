"""Where each layer lay: read from the plan artifacts that the runs name, as far as those are still there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offstage.pipeline.metrics import MetricTable
from offstage.pipeline.regular_files import lies_in, read_object
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.run_schema import Run
from offstage.pipeline.signatures import is_own_config

PLAN_STAGE = "plan"
_PLAN, _MAP = "plan.json", "device_map.json"


@dataclass(frozen=True, slots=True)
class PlacedLayer:
    """One layer of a plan and the devices that its tensors lie on, in the order of the tiers."""

    name: str
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunPlacement:
    """One plan: its layers in the order of execution, and the jobs that followed it."""

    jobs: tuple[str, ...]
    layers: tuple[PlacedLayer, ...]


@dataclass(frozen=True, slots=True)
class Placements:
    """The different plans that could be read, the jobs whose plan is gone, and how many plans were not looked at."""

    plans: tuple[RunPlacement, ...]
    pruned: tuple[str, ...]
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


def read_placements(jobs: Sequence[Job], *, most: int) -> Placements:
    """Return the first ``most`` different plans of ``jobs``; jobs that share an artifact share a plan."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        stage = job.run.stage(PLAN_STAGE)
        if stage:
            groups.setdefault(stage.key or str(stage.artifact), []).append(job)
    plans: list[RunPlacement] = []
    pruned: list[str] = []
    members = list(groups.values())
    while members and len(plans) < most:
        group = members.pop(0)
        names, layers = tuple(job.name for job in group), read_layers(group[0].run)
        if layers:
            plans.append(RunPlacement(names, layers))
        else:
            pruned += names
    return Placements(tuple(plans), tuple(pruned), len(members))


def read_layers(run: Run) -> tuple[PlacedLayer, ...]:
    """Return the layers of a run's plan: from its artifact, else the record's own map, none where neither is
    there: a pruned cache is no fault of the report."""
    folder = _artifact(run)
    plan = _read(folder, _PLAN)
    if found := _layers(plan.get("layers"), plan.get("reasons")):
        return found
    entries = _read(folder, _MAP) or run.device_map or {}
    return tuple(PlacedLayer(name or "the model", (str(device),)) for name, device in entries.items())


def _read(folder: Path | None, name: str) -> Mapping[str, Any]:
    """Return the object that the file ``name`` of an artifact holds; an empty one where it is none of its own."""
    return read_object(folder / name) if folder and lies_in(folder / name, [folder]) else {}


def _artifact(run: Run) -> Path | None:
    """Return the folder of the run's plan: where the record says, or in the cache beside a tree that was moved.

    A stranger's record names none outside the tree that it lies in.
    """
    stage = run.stage(PLAN_STAGE)
    if stage is None:
        return None
    caches = [above / "cache" / PLAN_STAGE for above in run.folder.parents]
    moved = [cache / Path(stage.key).name for cache in caches] if stage.key else []
    places = [Path(stage.artifact), *moved]
    found = next((folder for folder in places if folder.is_absolute() and folder.is_dir()), None)
    if found is None or lies_in(found, [run.folder, *caches]) or is_own_config(run.config, run.signature, run.places):
        return found
    return next((folder for folder in moved if folder.is_dir() and lies_in(folder, caches)), None)


def _layers(alike: object, order: object) -> tuple[PlacedLayer, ...]:
    """Return the layers of a plan, which are written together where they are ``alike``, in their ``order``.

    Of what isn't written as a plan is there is nothing.
    """
    held: dict[str, list[str]] = {}
    try:
        for one in alike if isinstance(alike, list) else ():
            homes = in_tier_order(str(line["home"]) for line in one["lines"])
            held |= dict.fromkeys(map(str, one["names"]), homes)
    except (KeyError, TypeError):
        return ()
    names = [name for name in order if name in held] if isinstance(order, dict) else []
    return tuple(PlacedLayer(name, tuple(held[name])) for name in names if held[name])
