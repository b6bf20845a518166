"""What a user spells out: a map, checked and not changed; the overrides of single entries of any map; and how much of
an accelerator to free, where the other policies ask how much there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from offstage.stages.empty_init.skeleton import parent
from offstage.stages.plan import checks
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Budgets, Homes, Placement, budgeted_accelerators, main_device
from offstage.stages.units import CPU, DISK, DeviceId


def explicit(outline: Outline, device_map: Mapping[str, DeviceId]) -> Placement:
    """Return the placement that ``device_map`` (module or tensor name → device) spells out.

    Where entries are nested the longest name counts; of tied names one suffices. Raises ``ConfigError`` where the map
    doesn't fit the model (see ``checks``).
    """
    key = "device_map"
    checks.require_known_names(outline, device_map, key)
    checks.require_no_contradiction(outline, device_map, key)
    homes = spread(outline, device_map)
    checks.require_complete(outline, homes, key)
    checks.require_ties_together(outline, homes, key)
    leaders = {name: home for name, home in homes.items() if outline.skeleton.leader(name) == name}
    return Placement(leaders, main_device(leaders))


def spread(outline: Outline, device_map: Mapping[str, DeviceId]) -> dict[str, DeviceId]:
    """Return the device of every tensor that an entry of ``device_map`` covers, the longest name winning.

    A name that no entry covers and that is tied to one that is covered follows its twin.
    """
    homes: dict[str, DeviceId] = {}
    for name in sorted(device_map, key=lambda name: (name != "", name.count("."))):
        homes |= dict.fromkeys(outline.below(name), device_map[name])
    for group in outline.skeleton.tied:
        covered = [name for name in group if name in homes]
        if covered:
            homes = {**dict.fromkeys(group, homes[covered[0]]), **homes}
    return homes


def override(outline: Outline, placement: Placement, overrides: Mapping[str, DeviceId]) -> Placement:
    """Return ``placement`` with the entries of ``overrides`` changed, tensor by tensor.

    A tied tensor moves under all its names; overrides that would tear it apart raise ``ConfigError``.
    """
    if not overrides:
        return placement
    key = "device_map_overrides"
    checks.require_known_names(outline, overrides, key)
    moved = spread(outline, overrides)
    checks.require_ties_together(outline, moved, key)
    homes: Homes = {**placement.homes, **{outline.skeleton.leader(name): home for name, home in moved.items()}}
    computes_only = placement.main not in placement.homes.values()
    main = main_device(homes)
    packed = placement.packed - {outline.skeleton.leader(name) for name in moved}
    drawn = {outline.layer_of[name].name for name, home in moved.items() if isinstance(home, int)}
    computes = {layer: device for layer, device in placement.computes.items() if layer not in drawn}
    keeps = computes_only and (placement.main != CPU or main == CPU)
    first = placement.main if keeps else main
    return replace(placement, homes=homes, main=first, packed=packed, computes=computes)


def cpu_offload_gb(outline: Outline, budgets: Budgets, gigabytes: float) -> Placement:
    """Return the placement with ``gigabytes`` (10**9 bytes) of the no-split layers' parameters offloaded.

    Those are the first ones, parameter by parameter in the order of execution, while the bytes offloaded before are
    fewer than asked for; all computes on the accelerator all the same. They live on the host; without an accelerator,
    where the host computes, on disk. The experts of a layer go together: an expert is brought with all it has.
    """
    main = next(iter(budgeted_accelerators(budgets)), CPU)
    away: DeviceId = DISK if main == CPU else CPU
    homes: dict[str, DeviceId] = {tensor.name: main for tensor in outline.skeleton.unique}
    offloaded = 0
    for leader in _parameters(outline):
        if offloaded >= gigabytes * 10**9:
            break
        together = _together(outline, leader) if homes[leader] == main else ()
        homes |= dict.fromkeys(together, away)
        offloaded += sum(outline.sizes[name] for name in together)
    return Placement(homes, main)


def _together(outline: Outline, leader: str) -> tuple[str, ...]:
    """Return the parameters that are offloaded with ``leader``: those of the same experts, else itself alone."""
    return outline.experts[parent(leader)].tensors if leader in outline.expert_tensors else (leader,)


def _parameters(outline: Outline) -> list[str]:
    """Return the parameters that the no-split layers own, in the order of execution."""
    by_name = outline.skeleton.by_name
    owned = [name for layer in outline.layers if layer.name in outline.blocks for name in layer.owned]
    return [name for name in owned if by_name[name].kind == "parameter"]
