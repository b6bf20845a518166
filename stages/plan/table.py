"""The plan as a table for the terminal: what lies where, with runs of numbered modules folded into one line."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from offstage.stages.empty_init.skeleton import upward
from offstage.stages.plan.plan import Plan
from offstage.stages.units import DISK, DeviceId, format_bytes

_MOST_LISTED = 24
"""The letters that the numbers of a row's modules may take."""
_WIDTH = 100
"""The letters of a line: names give way."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, slots=True)
class Row:
    """Modules of one kind on one device: ``name`` may be a range, ``layers.0-9``; ``bytes`` is their sum.

    Of numbers that are many ranges it has the first and the last, and how many they are of all that the model has:
    ``layers.2-78.mlp (39 of 80)``. Which ones is in the device map.
    """

    name: str
    device: DeviceId
    execution: DeviceId
    bytes: int


def rows(plan: Plan, sizes: Mapping[str, int]) -> list[Row]:
    """Return the entries of the device map, those that differ only in their first number as one row a device.

    ``sizes`` are the bytes of every tensor. A tied tensor counts once in each row that names it.
    """
    inside: dict[str, list[str]] = {name: [] for name in plan.device_map}
    for tensor in sizes:
        inside[next(name for name in upward(tensor) if name in inside)].append(tensor)
    folded: dict[tuple[str, DeviceId, DeviceId], tuple[list[int], set[str]]] = {}
    known: dict[str, set[int]] = {}
    for name, tensors in inside.items():
        number = _NUMBER.search(name)
        stem = name if number is None else f"{name[: number.start()]}#{name[number.end() :]}"
        key = (stem, plan.device_map[name], plan.execution[tensors[0].rpartition(".")[0]])
        numbers, held = folded.setdefault(key, ([], set()))
        if number is not None:
            numbers.append(int(number[0]))
            known.setdefault(name[: number.start()], set()).add(numbers[-1])
        held |= {plan.tied.get(tensor, tensor) for tensor in tensors}
    return [
        Row(_name(stem, numbers, known) or "the model", device, execution, sum(map(sizes.__getitem__, held)))
        for (stem, device, execution), (numbers, held) in folded.items()
    ]


def _name(stem: str, numbers: Sequence[int], known: Mapping[str, Collection[int]]) -> str:
    """Return ``stem`` with ``numbers`` in their place, or with what they span where to list them takes too long.

    ``known`` are all numbers of the model, by what stands before them.
    """
    listed, before = ranges(numbers), stem.partition("#")[0]
    if len(listed) <= _MOST_LISTED:
        return stem.replace("#", listed)
    spanned = stem.replace("#", f"{min(numbers)}-{max(numbers)}")
    return f"{spanned} ({len(numbers)} of {len(known[before])})"


def ranges(numbers: Iterable[int]) -> str:
    """Return ``numbers`` as ranges: ``0-3,5``."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def render(plan: Plan, sizes: Mapping[str, int]) -> str:
    """Return the table as text: module, where it lies, where it computes, bytes; then a line for each device."""
    lines = [("module", "lies on", "computes on", "size")]
    for row in rows(plan, sizes):
        lines.append((row.name, str(row.device), str(row.execution), format_bytes(row.bytes)))
    slots = ["slots"] if plan.slots else []
    devices = [["device", "weights", "reserve", *slots, "budget"]]
    for device, held in plan.resident_bytes.items():
        reserve = plan.reserves.get(device, 0)
        budget = plan.budgets.get(device)
        room = "unlimited" if budget is None and device == DISK else format_bytes(budget or 0)
        kept = [format_bytes(plan.slots.get(device, 0)) for _ in slots]
        devices.append([named(plan, device), format_bytes(held), format_bytes(reserve), *kept, room])
    told = [*rates_told(plan), *links_told(plan), *experts_told(plan), *packed_told(plan), *host_layers_told(plan)]
    return "\n\n".join([_align(_bounded(lines)), _align(devices), *told])


def named(plan: Plan, device: DeviceId) -> str:
    """Return the id of ``device``, and the name that the config gives it: ``0 (RTX 4090)``."""
    name = plan.names.get(device)
    return f"{device} ({name})" if name else str(device)


def rates_told(plan: Plan) -> list[str]:
    """Return in words how fast the link and the memory of each accelerator are, where they are unlike."""
    told = [
        f"{named(plan, device)} {format_bytes(rates['link'])} over its link and {format_bytes(rates['device'])} in its "
        "memory"
        for device, rates in plan.device_rates.items()
    ]
    return [f"a second: {'; '.join(told)}"] if told else []


def slots_told(plan: Plan, device: DeviceId) -> str:
    """Return in words how many of the experts that ``device`` computes can be kept there."""
    pool = plan.pools[device]
    return f"{pool.count(plan.slots[device])} slots for {pool.experts} experts"


def experts_told(plan: Plan) -> list[str]:
    """Return in words what the slots for experts are, and what a token brings of those that aren't in one."""
    if not plan.pools:
        return []
    where = ", ".join(f"{slots_told(plan, device)} on {device}" for device in plan.pools)
    found, brought = plan.forecast["expert_hit_rate"], int(plan.forecast["expert_bytes_per_token"])
    told = f"{where}; {found:.0%} of those a token uses are expected there; {format_bytes(brought)} a token are brought"
    return [f"{told}, which assumes uniform routing"]


def links_told(plan: Plan) -> list[str]:
    """Return in words what goes over the link of each accelerator for a token, where several stream."""
    links = [f"{format_bytes(count)} over that of {device}" for device, count in plan.link_bytes_per_token.items()]
    return [f"a token brings {', '.join(links)}, side by side"] if len(links) > 1 else []


def packed_told(plan: Plan) -> list[str]:
    """Return in words what rests packed, where and by which codec, and what it comes to as it is used."""
    told = []
    for codec, lying in plan.packed.items():
        where = " and ".join(
            f"{format_bytes(count)} on {device}" for device, count in lying.items() if device != "used"
        )
        told.append(f"{codec}: {where} rest packed, {format_bytes(lying['used'])} as they are used")
    rooms = " and ".join(f"{format_bytes(count)} on {device}" for device, count in plan.unpacking.items())
    return [*told, f"what comes to an accelerator packed is unpacked there, by {rooms}"] if rooms else told


def host_layers_told(plan: Plan) -> list[str]:
    """Return in words how many layers compute on the host by choice, and what that means for the answer."""
    if not plan.host_layers:
        return []
    count, read = len(plan.host_layers), int(plan.forecast["host_read_bytes_per_token"])
    return [
        f"{count} of {len(plan.reasons)} layers compute on the host, where they lie: {format_bytes(read)} a token are "
        "read there; the last bits may differ from those of other placements"
    ]


def _bounded(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return ``lines`` of cells with their first ones cut in the middle where a line would be wider than ``_WIDTH``."""
    others = sum(2 + max(map(len, column)) for column in list(zip(*lines, strict=True))[1:])
    return [[_shortened(first, _WIDTH - others), *rest] for first, *rest in lines]


def _shortened(name: str, most: int) -> str:
    if len(name) <= most:
        return name
    end = (most - 1) * 2 // 3  # the end of a name says more than its beginning
    return f"{name[: most - 1 - end]}…{name[-end:]}"


def _align(lines: Sequence[Iterable[str]]) -> str:
    cells = [list(line) for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) if index == len(line) - 1 else cell.ljust(width)
                  for index, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    )  # fmt: skip
