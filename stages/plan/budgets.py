"""The bytes of weights that each device may hold: what ``max_memory`` says, or what the machine can give.

An automatic budget is a sum of stated terms. All of them stand in the plan, so that a replay starts from the same
numbers on a machine that is otherwise busy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from offstage.pipeline.errors import ConfigError
from offstage.stages.machine.hardware import Hardware, coarse_step
from offstage.stages.machine.host_memory import Host
from offstage.stages.plan.allocator import AllocatorCost
from offstage.stages.plan.outline import Layer
from offstage.stages.plan.placement import Placement
from offstage.stages.units import CPU, DISK, DeviceId, format_bytes, in_tier_order, parse_device, parse_size

NO_COST = AllocatorCost()

MARGIN = 0.05
"""The share of a device's free memory that automatic budgets leave to whoever else takes of it."""

LEAST_MARGIN = 0.02
"""The share that they leave where nobody else does, under a cap, and where memory is short.

Peaks are predicted within it, and the kernel's own pages (page tables, files) count too.
"""

LIBRARY_BYTES = 90 * 10**6
"""The file pages of torch and the other libraries that a forward runs through again and again.

They are page cache and not the process's own, but a cgroup pays for them, and without them every call would read its
own code from storage. A run has mapped 105 to 120 MB of them after its first tokens, of which a second of decoding
touches 15; but where the storage reads 8 MB around each page that is wanted, each drives others out. With 84 MB left to
them a token took as long as with more, and 0.4 million pages were read again in all.
"""

LEAST_LIBRARY_BYTES = 75 * 10**6
"""What they are left at the least. With 74 MB 2.7 million pages were read again, and a token took twice as long; with
64 and less 10 million and more, and a dense model's and a mixture's tokens took minutes in place of a second.
"""


@dataclass(frozen=True)
class Allowance:
    """``budgets`` by device (null: unlimited), the ``terms`` of automatic ones, and ``notes`` in words.

    ``by_blocks`` says that the request is what it takes where the widest weights come by blocks of rows.
    """

    budgets: Mapping[DeviceId, int | None]
    terms: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    by_blocks: bool = False

    @property
    def host_terms(self) -> Mapping[str, int]:
        """The terms of an automatic budget of the host."""
        return self.terms.get(str(CPU), {})

    @property
    def host_room(self) -> int:
        """The bytes that an automatic budget of the host can come to where little is left to all else."""
        return sum(self.host_terms.values()) + sum(_spared(self.host_terms).values())

    def with_least(self, device: DeviceId, needed: int) -> Allowance | None:
        """Return this with an automatic budget of ``needed`` bytes, null where ``device`` can't give them.

        It is the host's, which leaves less to the libraries' pages, and as a margin, than it would.
        """
        spared, short = dict(self.host_terms), needed - sum(self.host_terms.values())
        if device != CPU or not spared or needed > self.host_room:
            return None
        for name, count in _spared(self.host_terms).items():
            spared[name] += min(count, short)
            short -= min(count, short)
        pages = f"{format_bytes(-spared['libraries'])} are left to libraries' pages"
        note = f"the host's memory is short: its budget is the least that works, {format_bytes(needed)}, and {pages}"
        return self._with_host(spared, needed, notes=(*self.notes, note))

    def beside(self, term: str, count: int) -> Allowance:
        """Return this with an automatic budget of the host that leaves ``count`` bytes for that ``term``."""
        terms = {**self.host_terms, term: -count}
        return self._with_host(terms, max(0, sum(terms.values())), notes=self.notes)

    def _with_host(self, terms: Mapping[str, int], budget: int, *, notes: tuple[str, ...]) -> Allowance:
        return replace(self, budgets={**self.budgets, CPU: budget}, terms={**self.terms, str(CPU): terms}, notes=notes)


def _spared(terms: Mapping[str, int]) -> dict[str, int]:
    """Return what an automatic budget can do with less of than it leaves, of its ``terms``: the margin comes first."""
    least = {"margin": round(terms.get("available", 0) * LEAST_MARGIN), "libraries": LEAST_LIBRARY_BYTES}
    return {name: max(0, -terms.get(name, 0) - count) for name, count in least.items()}


def least_available(needed: int, host: Host) -> float:
    """Return the bytes that ``host`` must have available for ``needed`` of them, and what is left in any case."""
    return (needed + LEAST_LIBRARY_BYTES) / (1 - LEAST_MARGIN) * (1.0 if host.limit else coarse_step())


def allow(
    max_memory: Mapping[str, str] | None,
    machine: Hardware,
    *,
    needed: int = 0,
    host_needed: int | None = None,
    unpacking: int = 0,
    allocator: AllocatorCost = NO_COST,
) -> Allowance:
    """Return what every device may hold. An empty or null ``max_memory`` is automatic.

    ``needed`` is what this request takes beside weights where it computes (KV cache, activations), in bytes; an
    automatic budget of any device that may compute leaves it free: that of the host ``host_needed``, by default as much
    where no accelerator computes, and what ``unpacking`` takes there; that of an accelerator what torch's ``allocator``
    takes.
    An accelerator that is listed but not there is passed over, and a note says so.
    """
    on_host = (0 if machine.accelerators else needed) if host_needed is None else host_needed
    allowance = (
        _given(max_memory, machine) if max_memory else _automatic(machine, needed, on_host, unpacking, allocator)
    )
    return replace(allowance, notes=(*allowance.notes, *_simulated(machine)))


def _simulated(machine: Hardware) -> list[str]:
    count = sum(accelerator.simulated for accelerator in machine.accelerators)
    return [f"{count} simulated accelerator{'s' * (count > 1)}: times are those of the cpu"] if count else []


def _given(max_memory: Mapping[str, str], machine: Hardware) -> Allowance:
    budgets: dict[DeviceId, int | None] = {CPU: 0, DISK: None}
    notes = []
    for key, size in max_memory.items():
        device = parse_device(key)
        if isinstance(device, int) and device >= len(machine.accelerators):
            notes.append(f"max_memory.{device} is unused: {_absent(device, machine)}")
        else:
            budgets[device] = _parse(key, size, size_of(device, machine))
    return Allowance(_ordered(budgets), notes=tuple(notes))


def _parse(key: str, size: int | str, whole: int | None) -> int:
    try:
        return parse_size(size, of=whole)
    except ValueError as error:
        raise ConfigError(f"max_memory.{key}: {error}") from error


def size_of(device: DeviceId, machine: Hardware) -> int | None:
    """Return the bytes of memory that ``device`` has; null where that isn't known."""
    if isinstance(device, int):
        return machine.accelerators[device].total_bytes if device < len(machine.accelerators) else None
    return machine.host.total_bytes if device == CPU else None


def _automatic(machine: Hardware, needed: int, host_needed: int, unpacking: int, allocator: AllocatorCost) -> Allowance:
    terms: dict[str, dict[str, int]] = {}
    for index in range(len(machine.accelerators)):
        free = machine.free(index)
        process = machine.accelerators[index].process_bytes
        taken = {"process": -process} if process else {}
        items = {"free": free, **taken, "request": -needed, "margin": -_margin(index, machine)}
        terms[str(index)] = items | {"allocator": -allocator.within(sum(items.values()))}
    free = machine.free(CPU)
    terms["cpu"] = {
        "available": free,
        "process": -machine.host.process_bytes,
        "libraries": -LIBRARY_BYTES,
        "request": -host_needed,
        "margin": -_margin(CPU, machine),
    } | ({"dequantising": -unpacking} if unpacking else {})
    budgets: dict[DeviceId, int | None] = {parse_device(key): max(0, sum(of.values())) for key, of in terms.items()}
    return Allowance(_ordered({**budgets, DISK: None}), terms)


def rooms(machine: Hardware, *, leaves: bool) -> dict[DeviceId, int]:
    """Return what each device has for weights and all else, as plans go by it.

    ``leaves`` says that what automatic budgets leave to the rest of the system is left: the margin, and libraries.
    """
    devices: list[DeviceId] = [CPU, *range(len(machine.accelerators))]
    libraries = {CPU: LIBRARY_BYTES}
    left = {each: _margin(each, machine) + libraries.get(each, 0) if leaves else 0 for each in devices}
    return {each: max(0, machine.free(each) - left[each]) for each in devices}


def _margin(device: DeviceId, machine: Hardware) -> int:
    """Return the bytes of ``device`` that are left to others, or for noise where its memory is this run's own."""
    capped = device == CPU and machine.host.limit
    return round(machine.free(device) * (LEAST_MARGIN if capped else MARGIN))


def _ordered(budgets: Mapping[DeviceId, int | None]) -> dict[DeviceId, int | None]:
    return {device: budgets[device] for device in in_tier_order(budgets)}


def _absent(device: int, machine: Hardware) -> str:
    count = len(machine.accelerators)
    return f"no accelerator {device} here" + (f", the last is {count - 1}" if count else "")


def with_idle_noted(allowance: Allowance, placement: Placement, *, layers: Sequence[Layer], policy: str) -> Allowance:
    """Return ``allowance`` with a note for each accelerator with a budget that is idle while others overflow.

    It holds nothing, and doesn't compute what is streamed either.

    ``layers`` are those that a policy keeps whole. Where one of them that lies elsewhere would have fitted, it is the
    ``policy`` that left the accelerator idle, and the note says so.
    """
    homes, used = placement.homes, {*placement.homes.values(), *placement.computes.values()}
    if not {CPU, DISK} & set(homes.values()):
        return allowance
    away = [layer.bytes for layer in layers if {CPU, DISK} & {homes[name] for name in layer.owned}]
    notes = []
    for device, room in allowance.budgets.items():
        if isinstance(device, int) and room and device not in used:
            small = not away or room < min(away)
            why = "its budget is too small for a layer" if small else f"device_map ({policy}) puts none there"
            notes.append(f"accelerator {device} holds no weights: {why}")
    return replace(allowance, notes=(*allowance.notes, *notes))


def require_present(devices: Mapping[str, DeviceId], machine: Hardware, key: str) -> None:
    """Raise ``ConfigError``, naming the config ``key``, where a map's entry names an accelerator that isn't there."""
    for name, device in devices.items():
        if isinstance(device, int) and device >= len(machine.accelerators):
            raise ConfigError(f"{key}: {name!r} is on {device}, but {_absent(device, machine)}")
