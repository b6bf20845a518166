"""The checks of a device map and of a placement: what must not wait until a run fails."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Mapping, Sequence

from offstage.pipeline.errors import BudgetError, ConfigError, closest
from offstage.stages.empty_init.skeleton import longest_prefix
from offstage.stages.inputs.generate_options import CACHE, OFFLOADED
from offstage.stages.machine.caching_allocator import LARGE_SEGMENT
from offstage.stages.machine.hardware import Hardware
from offstage.stages.machine.host_memory import PROCESS_BYTES, Host
from offstage.stages.plan.allocator import AllocatorCost
from offstage.stages.plan.budgets import NO_COST, least_available
from offstage.stages.plan.layout import Layout
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Shortage
from offstage.stages.plan.plan import DevicePlan, Plan, part_name
from offstage.stages.units import CPU, DISK, DeviceId, format_bytes, in_tier_order

LISTED = 8
"""How many names an error lists before it counts the rest."""


class ShortageError(BudgetError):
    """A device's budget is less than the least that works; what that means is ``told`` otherwise where it is known."""

    def __init__(self, shortage: Shortage, message: str = "") -> None:
        super().__init__(message or _told(shortage))
        self.shortage = shortage


def host_is_short(shortage: Shortage, terms: Mapping[str, int], host: Host) -> BudgetError:
    """Return the error of a ``host`` that can't give the least that works, whose budget was worked out by ``terms``."""
    taken = [(name, -terms[name]) for name in ("process", "request", "dequantising", "staging") if terms.get(name)]
    beside = "".join(f"{format_bytes(count)} for its {name}, " for name, count in taken)
    enough = least_available(shortage.least + sum(count for _, count in taken), host)
    enough = math.ceil(enough / mmap.PAGESIZE) * mmap.PAGESIZE  # a group's limit is rounded down to whole pages
    return BudgetError(
        f"{_limit(host)}: {format_bytes(host.available_bytes)} are free on the host, and the run takes {beside}"
        f"{_wants(shortage)}; the least that works is {enough} bytes ({format_bytes(enough)}), or ask for less: "
        "shorter prompts, fewer new tokens, smaller batches"
    )


def require_process_room(host: Host) -> None:
    """Raise ``BudgetError`` where a limit of the ``host`` is less than libraries take: they would be killed while they
    are imported, without a word.
    """
    if host.limit and host.total_bytes < PROCESS_BYTES:
        raise BudgetError(
            f"{host.limit}: {format_bytes(host.total_bytes)} are allowed, and a run's process takes some"
            f" {format_bytes(PROCESS_BYTES)} beside weights; allow more"
        )


def _limit(host: Host) -> str:
    return host.limit or "this machine's memory (MemAvailable in /proc/meminfo)"


def require_known_names(outline: Outline, names: Iterable[str], key: str) -> None:
    """Raise ``ConfigError`` where a name is neither a module nor a tensor of the model."""
    for name in names:
        if name not in outline.names:
            raise ConfigError(f"{key}: {name!r} names nothing in the model{closest(name, outline.names)}")


def require_no_contradiction(outline: Outline, device_map: Mapping[str, DeviceId], key: str) -> None:
    """Raise ``ConfigError`` where entries below a module leave nothing of what the module's own entry says.

    A module's entry speaks for the tensors below it that have no entry of their own. Where all have one, and one of
    them is on another device, the module's entry is not true of the module.
    """
    for name, device in device_map.items():
        spoken_for = [longest_prefix(tensor, device_map) or "" for tensor in outline.below(name)]
        strangers = [entry for entry in spoken_for if entry != name and device_map[entry] != device]
        if strangers and name not in spoken_for:
            other = strangers[0]
            raise ConfigError(
                f"{key}: {name!r} is on {device!r}, but {other!r} in it is on {device_map[other]!r} and nothing in it"
                f" is left to {name!r}; remove that entry or one of the others"
            )


def require_complete(outline: Outline, homes: Mapping[str, DeviceId], key: str) -> None:
    """Raise ``ConfigError`` where a tensor has no home, naming the modules or tensors that the map must add."""
    missing = [name for name in outline.sizes if name not in homes]
    if missing:
        tops = list(dict.fromkeys(_highest(outline, name, homes) for name in missing))
        others = f" and {len(tops) - LISTED} more" if len(tops) > LISTED else ""
        wanted = ", ".join(map(repr, tops[:LISTED])) + others
        raise ConfigError(
            f"{key}: no entry covers {_counted(missing)}; add {wanted}, or '' in a config file for all that"
            " the map doesn't name"
        )


def _highest(outline: Outline, name: str, homes: Mapping[str, DeviceId]) -> str:
    """Return the outermost module around the tensor ``name`` none of whose tensors has a home, or the tensor itself."""
    while (above := name.rpartition(".")[0]) and not any(below in homes for below in outline.below(above)):
        name = above
    return name


def require_ties_together(outline: Outline, homes: Mapping[str, DeviceId], key: str) -> None:
    """Raise ``ConfigError`` where the names of one tied tensor have different homes."""
    for group in outline.skeleton.tied:
        placed = [name for name in group if name in homes]
        for name in placed[1:]:
            if homes[name] != homes[placed[0]]:
                raise ConfigError(
                    f"{key}: {placed[0]!r} (on {homes[placed[0]]!r}) and {name!r} (on {homes[name]!r}) are one tied"
                    " tensor; give them one device"
                )


def require_fit(layout: Layout) -> None:
    """Raise ``ShortageError``, with the least budget that would work, where a device can't hold what must be there."""
    shortage = layout.shortage(tight=True)
    if shortage is not None:
        raise ShortageError(shortage)


def has_room(plan: Plan, rooms: Mapping[DeviceId, int]) -> bool:
    """Return whether each of ``rooms`` has the bytes of its device's predicted peak, as ``require_room`` counts it."""
    return all(one.own_bytes <= rooms[device] for device, one in plan.devices.items() if device in rooms)


def require_room(plan: Plan, machine: Hardware, allocator: AllocatorCost) -> None:
    """Raise ``BudgetError``, with the most that works, where a device's predicted peak is more than it has.

    What simulated accelerators hold is left out: the machine that is planned for has them. ``allocator`` is what
    torch's takes of an accelerator beside fewer weights.
    """
    rooms: dict[DeviceId, int] = {CPU: machine.host.available_bytes}
    rooms |= {index: accelerator.free_bytes for index, accelerator in enumerate(machine.accelerators)}
    for device in in_tier_order(rooms):
        if not has_room(plan, {device: rooms[device]}):
            cost = NO_COST if device == CPU else allocator
            raise BudgetError(_excess(plan.devices[device], device, cost, room=rooms[device], host=machine.host))


def _excess(one: DevicePlan, device: DeviceId, allocator: AllocatorCost, *, room: int, host: Host) -> str:
    limit, key = f"max_memory.{device}", ""
    if one.budget_terms and device == CPU:
        limit, key = _limit(host), " as max_memory.cpu"
    terms = ", ".join(f"{format_bytes(count)} {part_name(part)}" for part, count in one.own_parts.items() if count)
    # A reserve takes its part of the budget, whether the staging memory needs all of it or none (a map).
    reserve = max(one.ledger["reserve"], one.reserve)
    now, weights = one.ledger.get("allocator", 0), one.ledger["weights"] + reserve + one.ledger.get("expert_cache", 0)
    left = room - (one.own_bytes - weights - now)
    most = left - now if left > now else left - allocator.within(max(0, left)) - LARGE_SEGMENT
    advice = f"the most that works{key} is {most} bytes ({format_bytes(most)})"
    advice = advice if most > 0 else f"it needs {-most} bytes ({format_bytes(-most)}) more beside any weights"
    if device != CPU and one.ledger.get("cache", 0) > one.own_bytes - room:
        advice += f"; or have the KV cache wait on the host: generate.{CACHE}={OFFLOADED}"
    return (
        f"{limit}: the plan takes {format_bytes(one.own_bytes)} on {_place(device)} ({terms}), which has"
        f" {format_bytes(room)}; {advice}"
    )


def _told(shortage: Shortage) -> str:
    device, budget, needed = shortage.device, shortage.budget, shortage.least
    return (
        f"max_memory.{device}: {format_bytes(budget)} ({budget} bytes) can't hold {_wants(shortage)} on "
        f"{_place(device)}; the least that works is {needed} bytes ({format_bytes(needed)})"
    )


def _wants(shortage: Shortage) -> str:
    weights, reserve, slots = shortage.weights, shortage.reserve, shortage.slots
    wants = [f"{format_bytes(weights)} of weights"] if weights or not reserve + slots else []
    wants += [f"a reserve of {format_bytes(reserve)} for what is streamed and in use at once"] if reserve else []
    wants += [f"a slot of {format_bytes(slots)} for an expert"] if slots else []
    return " and ".join(wants)


def require_resident(plan: Plan, *, written: Mapping[str, str], learning: Sequence[str]) -> None:
    """Raise an error where a tensor isn't resident that changes: what is streamed comes back as the checkpoint has it.

    ``written`` has the tensors that the model's own code changes in place, and the module whose code does it; a
    ``ConfigError`` then. A ``ShortageError``, with the budget by which all are resident, where it is ``learning``.
    """
    if lost := [name for name in written if plan.tensors[name].serving]:
        raise ConfigError(
            f"device_map: {_counted(lost)} can't wait on {plan.tensors[lost[0]].home}: the code of module "
            f"{written[lost[0]]!r} changes it in place, and what is streamed comes back unchanged; keep it where it "
            "computes, with a larger max_memory or device_map_overrides"
        )
    if away := [name for name in learning if plan.tensors[name].serving]:
        device = plan.tensors[away[0]].computes
        computed = {line.leader: line.used for line in plan.tensors.values() if line.computes == device}
        least = sum(computed.values())
        raise ShortageError(
            Shortage(device, plan.budgets.get(device) or 0, least, 0, 0),
            f"max_memory.{device}: {_counted(away)} would wait on {plan.tensors[away[0]].home}, and what is streamed "
            f"can't learn; the least that works is {least} bytes ({format_bytes(least)}); or train an adapter beside "
            "streamed weights: finetune.lora={r: 8}",
        )


def require_host(plan: Plan) -> None:
    """Refuse a ``plan`` by which anything computes elsewhere than on the host: it alone multiplies what is packed."""
    other = next((device for device in plan.execution.values() if device != CPU), None)
    if other is not None:
        raise ConfigError(
            f"quantized.products: 'fused' multiplies on the host alone, and by this plan {_place(other)} computes; "
            "take 'exact', or device_map=cpu"
        )


def _counted(names: Sequence[str]) -> str:
    """Return the first of ``names``, and how many more there are."""
    return f"{names[0]!r} and {len(names) - 1} more" if len(names) > 1 else repr(names[0])


def _place(device: DeviceId) -> str:
    return "the host" if device == CPU else "the disk" if device == DISK else f"accelerator {device}"
