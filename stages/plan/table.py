"""The plan as a table for the terminal: what lies where, with runs of numbered modules folded into one line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from offstage.pipeline.report.quantities import scale_for
from offstage.stages.empty_init.skeleton import upward
from offstage.stages.plan.plan import PARTS, Plan
from offstage.stages.plan.serving import Line
from offstage.stages.units import DISK, DeviceId, format_bytes, in_tier_order

_MOST_LISTED = 24
"""The letters that the numbers of a row's modules may take."""
_WIDTH = 80
"""The letters of a line: names give way."""
_LEAST_NAME = 14
"""The letters that names have in any case."""
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


def rows(plan: Plan) -> list[Row]:
    """Return the entries of the device map, those that differ only in their first number as one row a device.

    A tied tensor counts once in each row that names it.
    """
    inside: dict[str, list[Line]] = {name: [] for name in plan.device_map}
    for tensor, line in plan.tensors.items():
        inside[next(name for name in upward(tensor) if name in inside)].append(line)
    folded: dict[tuple[str, DeviceId, DeviceId], tuple[list[int], dict[str, int]]] = {}
    numbers_of: dict[str, set[int]] = {}
    for name, lines in inside.items():
        number = _NUMBER.search(name)
        stem = name if number is None else f"{name[: number.start()]}#{name[number.end() :]}"
        numbers, sizes = folded.setdefault((stem, plan.device_map[name], lines[0].computes), ([], {}))
        if number is not None:
            numbers.append(int(number[0]))
            numbers_of.setdefault(name[: number.start()], set()).add(numbers[-1])
        sizes |= {line.leader: line.bytes for line in lines}
    return [
        Row(_name(stem, numbers, numbers_of) or "the model", device, execution, sum(sizes.values()))
        for (stem, device, execution), (numbers, sizes) in folded.items()
    ]


def _name(stem: str, numbers: Sequence[int], all_numbers: Mapping[str, Collection[int]]) -> str:
    """Return ``stem`` with ``numbers`` in their place, or with what they span where to list them takes too long.

    ``all_numbers`` are all of the model, by what stands before them.
    """
    listed, before = ranges(numbers), stem.partition("#")[0]
    if len(listed) <= _MOST_LISTED:
        return stem.replace("#", listed)
    spanned = stem.replace("#", f"{min(numbers)}-{max(numbers)}")
    return f"{spanned} ({len(numbers)} of {len(all_numbers[before])})"


def ranges(numbers: Iterable[int]) -> str:
    """Return ``numbers`` as ranges: ``0-3,5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def render(plan: Plan) -> str:
    """Return the table as text: module, where it lies, where it computes, bytes; then what each device has at its peak,
    by what it is for, and what isn't a sum.
    """
    lines = [["module", "lies on", "computes on", "size"]]
    lines += [[row.name, str(row.device), str(row.execution), format_bytes(row.bytes)] for row in rows(plan)]
    remarks = [*rates_told(plan), *links_told(plan), *experts_told(plan), *packed_told(plan), *host_layers_told(plan)]
    ledger, hosts = ledger_rows(plan), host_rows(plan)
    apart = [_align(_bounded(hosts), numbers=len(hosts[0]) - 2)] if hosts else []
    tables = [_align(_bounded(lines), numbers=1), _align(_bounded(ledger), numbers=len(ledger[0]) - 1)]
    return "\n\n".join([*apart, *tables, *remarks])


def host_rows(plan: Plan) -> list[list[str]]:
    """Return a row of cells for each host that the model is divided among; none where there is one."""
    if not plan.hosts:
        return []
    rows = [["host", "computes", "in memory", "on disk", "streamed a token", "its seconds"]]
    for number, host in enumerate(plan.hosts):
        in_memory = sum(size for device, size in host.weights.items() if device != DISK)
        sizes = [format_bytes(size) for size in (in_memory, host.weights.get(DISK, 0), host.streamed_bytes)]
        mark = f"{number}{' (below)' * (number == plan.host)}"
        rows.append([mark, host.blocks, *sizes, f"{host.seconds:.3g} s"])
    return rows


def summary(plan: Plan) -> str:
    """Return in a few lines what each device has at its peak, by what it is for, and what is expected of a token."""
    ledger, streamed = ledger_rows(plan), float(plan.forecast.get("streamed_bytes_per_token", 0))
    seconds, bottleneck = plan.forecast.get("seconds_per_token"), plan.forecast.get("bottleneck")
    expected = f", {float(seconds):.3g} s expected, bottleneck: {bottleneck}" if seconds else ""
    return (
        f"{_align(_bounded(ledger), numbers=len(ledger[0]) - 1)}\n{format_bytes(streamed)} streamed a token{expected}"
    )


def ledger_rows(plan: Plan) -> list[list[str]]:
    """Return a row of cells for each device: what it has at its peak, by what it is for, and the sum.

    The budget stands after what is part of it. All are in one unit, which the first row has, above what is for what;
    columns of nothing are left out. What simulated accelerators hold isn't the host's own.
    """
    devices = [(device, one) for device, one in plan.devices.items() if one.is_used]
    counts: dict[str, list[int | None]] = {}
    for title in dict.fromkeys(PARTS.values()):
        if title == PARTS["cache"]:
            counts["of budget"] = [one.budget for _, one in devices]
        counts[title] = [sum(one.ledger.get(part, 0) for part in PARTS if PARTS[part] == title) for _, one in devices]
    shown = {title: column for title, column in counts.items() if any(column) or title in ("weights", "of budget")}
    sums = [one.own_bytes for _, one in devices]
    scale = scale_for([*sums, *(one.budget for _, one in devices)], "bytes")
    cells = [["unlimited" if count is None else scale.number(count) if count else "" for count in column]
             for column in shown.values()]  # fmt: skip
    names, totals = [named(plan, device) for device, _ in devices], [scale.number(count) for count in sums]
    return [[f"{scale.unit} on", *shown, "sum"], *map(list, zip(names, *cells, totals, strict=True))]


def named(plan: Plan, device: DeviceId) -> str:
    """Return the id of ``device``, and the name that the config gives it: ``0 (RTX 4090)``."""
    name = plan.devices[device].name
    return f"{device} ({name})" if name else str(device)


def rates_told(plan: Plan) -> list[str]:
    """Return in words how fast the link and the memory of each accelerator are, where they are unlike."""
    rates = [
        f"{named(plan, device)} {format_bytes(one.rates['host_to_device'])} from the host and "
        f"{format_bytes(one.rates['device'])} from its memory"
        for device, one in plan.devices.items()
        if one.rates
    ]
    return [f"a second: {'; '.join(rates)}"] if rates else []


def experts_told(plan: Plan) -> list[str]:
    """Return in words what the slots for experts are, and what a token brings of those that aren't in one."""
    where = [
        f"expert cache of {one.pool.count(one.expert_cache)} slots for {one.pool.experts} experts on {device}"
        for device, one in plan.devices.items()
        if one.pool is not None
    ]
    if not where:
        return []
    hit_rate, brought = plan.forecast["expert_hit_rate"], int(plan.forecast["expert_bytes_per_token"])
    sentence = f"hit rate {hit_rate:.0%} with uniform routing, so {format_bytes(brought)} of experts a token are read"
    return [f"{', '.join(where)}; {sentence}"]


def links_told(plan: Plan) -> list[str]:
    """Return in words what goes over the link of each accelerator for a token, where several stream."""
    devices = plan.devices.items()
    links = [f"{format_bytes(one.transfer_bytes)} to {device}" for device, one in devices if one.transfer_bytes]
    return [f"a token streams {', '.join(links)}, side by side"] if len(links) > 1 else []


def packed_bytes(plan: Plan) -> dict[str, Counter[DeviceId]]:
    """Return the bytes that rest packed, by codec and where they lie, and under ``used`` what they come to."""
    totals: dict[str, Counter[DeviceId]] = {}
    for name, line in plan.tensors.items():
        if line.codec is not None and name == line.leader:
            totals.setdefault(line.codec, Counter()).update({"used": line.used, line.home: line.bytes})
    return totals


def packed_told(plan: Plan) -> list[str]:
    """Return in words what rests packed, where and by which codec, and what it comes to as it is used."""
    lines = []
    for codec, lying in packed_bytes(plan).items():
        homes = in_tier_order(lying.keys() - {"used"})
        where = " and ".join(f"{format_bytes(lying[home])} on {home}" for home in homes)
        lines.append(f"{codec}: {where} at rest, {format_bytes(lying['used'])} in use")
    devices = plan.devices.items()
    rooms = " and ".join(f"{format_bytes(one.dequantising)} on {device}" for device, one in devices if one.dequantising)
    return [*lines, f"accelerators dequantise what streams to them, in {rooms}"] if rooms else lines


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
    return [[_shortened(first, max(_LEAST_NAME, _WIDTH - others)), *rest] for first, *rest in lines]


def _shortened(name: str, most: int) -> str:
    if len(name) <= most:
        return name
    end = (most - 1) * 2 // 3  # the end of a name says more than its beginning
    return f"{name[: most - 1 - end]}…{name[-end:]}"


def _align(lines: Sequence[Sequence[str]], *, numbers: int) -> str:
    """Return ``lines`` of cells as text; so many columns at the end have ``numbers``."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if index < len(line) - numbers else cell.rjust(width)
                  for index, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )  # fmt: skip
