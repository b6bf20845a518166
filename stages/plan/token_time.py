"""How long a token takes, by the bytes that move for it.

Decoding is bound by the movement of weights: each token reads the resident weights once from the memory they lie in,
and the streamed ones once from where they wait. Reading ahead overlaps these, so a token takes as long as the slowest
of storage, links and memory (the roofline argument, with bytes in place of operations). A pass of many tokens takes as
long as these compute, where that is longer than reading what they compute with. Each accelerator has a link of
its own; memories are read one after the other, as layers compute, those of the host among them where it computes some
beside accelerators. That links read the host's memory too isn't counted. Beside its bytes each call of a module takes
the host a while, wherever it computes, and so does each tensor that is brought for it. What rests packed is read in
fewer bytes, and takes the cores that unpack it: the cores that compute, where the host does. An accelerator that
unpacks itself takes it over the link in fewer bytes too, and reads and writes its own memory for it: what it is given,
temporaries, what comes of it.

Nothing is read ahead of an expert that is only known as it is called: computing takes turns with reading and unpacking
it, which go on at once. What it is read into takes a while too where that was never used before, and the system clears
it. And what does go on at once on the host disturbs each other, reading, unpacking and computing: threads wait for a
core, and storage for the thread that asks it for more. Where staging has no room beside the part in use, storage waits
while that computes.

While another accelerator computes, a link runs ahead as far as its own one has room. Of a run of layers on one
accelerator what is more than that comes only when the run is under way, while all other links wait. So links work side
by side only where layers take turns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from offstage.stages.machine.rates import Rates
from offstage.stages.units import CPU, DISK, DeviceId

HOST, DEVICE, CROSSING, DEQUANTISING = "host memory", "device memory", "crossing", "dequantising"
HOST_TO_DEVICE = "host-to-device"
"""What the links take, each for its accelerator."""
HOST_CORES, DEVICE_CORES = "host cores", "device cores"
"""What takes the place of a memory where a pass has more tokens than compute while it is read."""
LAUNCHING = "kernel launches"
"""What the host takes to have accelerators compute, and to have brought what they compute with."""
WAITING = "host-to-device beside the host"
"""What layers wait for whose weights found no room ahead while the host computed."""
_APART = (DEVICE, DEVICE_CORES, LAUNCHING, WAITING)
"""What goes on at once while accelerators compute."""
IDLE = "storage without room"
"""How long storage waits for room to read to, which is in use."""
BRINGING, ROUTED, DEQUANTISING_ROUTED = "bringing", "storage for experts", "dequantising experts"
"""What the thread that computes does to have tensors brought, and what is read and unpacked as an expert is called."""
CLEARING = "memory never used"
"""What the system takes to give the host's slots memory that was never used."""
HOST_TOKENS, DEVICE_TOKENS = 16, 128
"""How many tokens compute in the time in which the weights are read from the host's memory, or an accelerator's.

Nominal: operations a second over bytes a second, of bfloat16."""
_CALLS_AHEAD, _CALLS_ROUTED, _CALLS_UNPACKED, _CALLS_MAPPED = 2.5, 5.5, 8.5, 3 / 4
"""In the time of so many calls of modules the host asks for a tensor, binds it and lets it go: one that is read ahead;
one of an expert that is called, of which several come at once, or one that the host unpacks then; and one that is
mapped, which lies where it is used. Nominal."""
_CALLS_OVER_LINK = 1.0
"""In the time of so many calls of modules on an accelerator the host has a tensor brought there that is a part of its
own; less, where it is brought with others. Nominal."""
_DISTURBANCE = 1 / 4
"""By which share of the shorter of two that go on at once they take longer: reading and what takes the cores, and of
that, unpacking and computing. Nominal."""
_UNPACKING_WHEN_CALLED = 3.7
"""How many times as long as by all cores it takes to unpack experts as they are called: one is the caller's, which asks
for them, and products that have begun wait for the threads that unpack. Nominal."""
_CLEARED = 3.5e9
"""Bytes of memory that the system clears in a second for a process that never used it, in small pages. Nominal."""
_STEADY = 3
"""After so many tokens what has come ahead is the same for each."""
_CACHE_MOVES = 2
"""How often a token moves what is kept of those before it: each block's keys and values are read and written as they
grow by one. Attention finds what was just written in the processor's caches."""
_CROSSING_SECONDS = 20e-6
"""What it takes that activations go from one device to another, however few they are: a copy, and waiting for it.
Nominal."""


@dataclass(slots=True)
class PassTraffic:
    """What a pass with a token for each of ``members`` moves, in bytes, and how much there is to do for it.

    What it brings to where it is used is ``at_rest``, by where it waits; of these those ``packed``, which come to what
    is ``unpacked``. ``used`` is all as it is used, by the device that computes it. ``runs`` has what of it can come
    ahead, in the order of execution, each device's as long as no other's comes between; the rest is asked for one layer
    at a time. Among them is what the host reads of layers that it computes beside accelerators. Each device runs ahead
    by the bytes of its one of ``reserves``; null: by all. What accelerators unpack themselves comes to
    ``unpacked_there``; each link brings what is ``saved`` less for it, and they move so many bytes in their memories.
    To have it brought for itself the host takes as long as for so many ``calls``, for accelerators as for so many
    ``launches``. Storage waits while it computes with so many bytes for which it has ``no_room_beside`` them. Of what
    waits on disk so much can't come ahead, since it is known ``when_called``; so much is ``unpacked_when_called`` by
    the host. Of experts it brings so many ``expert_bytes``, and finds others ``in_slots``; so much of them is
    ``experts_used``. So much of what it brings is ``filling`` slots on the host for the first time. Of ``caches`` that
    wait on the host so many bytes come to each device, each block's as it computes; of others so many are ``kept``
    there.

    A token reads what is ``held`` on each device that computes with it. So much of what the host reads is
    ``multiplied`` quantised, as it rests. Where accelerators compute and the host beside them, that reads ``host_read``
    of it, else null, and activations go there or come back in so many ``crossings``, each time ``output_bytes``. So
    many ``host_calls`` of modules that hold weights, and ``device_calls`` of those that accelerators compute, each take
    the host a while, however few these are, and so does what is around a token's calls: so many ``loops``, none where
    it is counted with an accelerator's calls. The tokens of a member's pass have ``computed`` with so many bytes on
    each device, each token counted; none where one does, while they are read.
    """

    members: float = 1
    reserves: Mapping[DeviceId, int] | None = None
    resident: Mapping[DeviceId, int] = field(default_factory=dict)
    multiplied: float = 0
    host_read: float | None = None
    crossings: int = 0
    output_bytes: int = 0
    host_calls: float = 0
    device_calls: float = 0
    loops: float = 0
    computed: Mapping[DeviceId, float] = field(default_factory=dict)
    at_rest: Counter[DeviceId] = field(default_factory=Counter)
    packed: float = 0
    unpacked: float = 0
    used: Counter[DeviceId] = field(default_factory=Counter)
    runs: list[tuple[DeviceId, float]] = field(default_factory=list)
    unpacked_there: float = 0
    saved: Counter[DeviceId] = field(default_factory=Counter)
    moved: Counter[DeviceId] = field(default_factory=Counter)
    calls: float = 0
    launches: float = 0
    when_called: float = 0
    unpacked_when_called: float = 0
    no_room_beside: float = 0
    expert_bytes: float = 0
    experts_used: float = 0
    in_slots: Counter[DeviceId] = field(default_factory=Counter)
    filling: float = 0
    caches: Counter[DeviceId] = field(default_factory=Counter)
    kept: Counter[DeviceId] = field(default_factory=Counter)

    def add(
        self,
        waits: DeviceId,
        rest_bytes: float,
        *,
        computes: DeviceId,
        unpacked: float | None = None,
        moved: float | None = None,
        tensors: float = 1,
        ahead: bool = True,
        mapped: bool = False,
    ) -> None:
        """Count what waits there in ``rest_bytes``, and is used ``unpacked`` in so many; null: as it rests.

        The accelerator that computes unpacks it by so many bytes ``moved`` in its memory; null: the host does. It is so
        many ``tensors``, each ``mapped``, or brought.
        """
        if computes == CPU:
            routed = _CALLS_ROUTED if unpacked is None else _CALLS_UNPACKED
            self.calls += tensors * (_CALLS_MAPPED if mapped else _CALLS_AHEAD if ahead else routed)
        else:
            self.launches += tensors * _CALLS_OVER_LINK
        self.when_called += 0 if ahead or waits != DISK else rest_bytes
        used = rest_bytes if unpacked is None else unpacked
        self.at_rest[waits] += rest_bytes  # type: ignore[assignment]
        self.used[computes] += used  # type: ignore[assignment]
        if unpacked is not None:
            self.packed += rest_bytes
            self.unpacked += unpacked
            self.unpacked_when_called += 0 if ahead or moved is not None else unpacked
        if moved is not None:
            self.unpacked_there += used
            self.saved[computes] += used - rest_bytes  # type: ignore[assignment]
            self.moved[computes] += moved  # type: ignore[assignment]
        if ahead and self.runs and self.runs[-1][0] == computes:
            self.runs[-1] = computes, self.runs[-1][1] + used
        elif ahead:
            self.runs.append((computes, used))

    @property
    def kept_moves(self) -> dict[DeviceId, float]:
        """The bytes of what is ``kept`` that a token moves on each device."""
        return {device: _CACHE_MOVES * count / self.members for device, count in self.kept.items()}

    def note_experts(self, computes: DeviceId, used: float, rest_bytes: float, *, rate: float) -> None:
        """Note that of experts with so many bytes ``used`` a share of ``rate`` is in slots, and the rest is brought."""
        self.expert_bytes += rest_bytes
        self.experts_used += used
        self.in_slots[computes] += used * rate  # type: ignore[assignment]

    @property
    def hit_rate(self) -> float | None:
        """The share of the experts that are used which is in slots; null where none lie elsewhere."""
        return self.in_slots.total() / self.experts_used if self.experts_used else None

    def compute_on_host(self, read_bytes: float) -> None:
        """Note that the host reads and computes so much then, beside accelerators: links bring what comes after."""
        self.runs.append((CPU, read_bytes))

    @property
    def bytes(self) -> float:
        """What is brought in all, as it rests."""
        return self.at_rest.total()

    @property
    def links(self) -> dict[DeviceId, float]:
        """What goes over the link of each accelerator."""
        apart = {device: count for device, count in self.used.items() if device != CPU and count}
        return {device: count - self.saved.get(device, 0) for device, count in apart.items()}

    @property
    def link_shares(self) -> dict[DeviceId, float]:
        """Which share of what is used comes over the link of each accelerator."""
        return {device: count / self.used[device] for device, count in self.links.items() if self.used[device]}

    @property
    def link_runs(self) -> list[tuple[DeviceId, float]]:
        """The ``runs``, of what is unpacked on an accelerator what comes over its link."""
        shares = self.link_shares
        return [(device, count * shares.get(device, 1)) for device, count in self.runs]


def token_seconds(brought: PassTraffic, rates: Rates) -> dict[str, float]:
    """Return the seconds that a token takes storage, the links, either memory, and the cores that unpack and compute,
    of a pass that moves what is ``brought``.
    """
    members, beside = brought.members, brought.host_read is not None
    host_read = brought.resident.get(CPU, 0) if brought.host_read is None else brought.host_read
    cores = brought.computed.get(CPU, 0) / rates.host / HOST_TOKENS
    caches = sum(count / rates.link_of(device) for device, count in brought.caches.items() if count) / members
    apart = sum(count / rates.device_of(device) for device, count in brought.computed.items() if device != CPU)
    calls, kept = brought.host_calls / rates.calls + brought.loops / rates.loops, brought.kept_moves.get(CPU, 0)
    beside_products = calls + kept / rates.host
    waiting = waiting_seconds(brought, rates, max(host_read / rates.host, cores) * members) / members if beside else 0.0
    return {
        "storage": brought.at_rest.get(DISK, 0) / rates.storage / members,
        IDLE: brought.no_room_beside / rates.host,
        HOST_TO_DEVICE: link_seconds(brought, rates) / members + caches,
        HOST: _read_on_host(host_read + brought.used.get(CPU, 0), brought, rates) + beside_products,
        HOST_CORES: cores + beside_products,
        DEVICE: _read_on_devices(brought, rates) / rates.device,
        DEVICE_CORES: apart / DEVICE_TOKENS,
        LAUNCHING: (brought.device_calls + brought.launches / members) / rates.launches,
        CROSSING: caches + brought.crossings * crossing_seconds(brought.output_bytes, rates),
        WAITING: waiting,
        DEQUANTISING: (brought.unpacked - brought.unpacked_there) / rates.dequantising / members,
        BRINGING: brought.calls / rates.calls / members,
        ROUTED: brought.when_called / rates.storage / members,
        DEQUANTISING_ROUTED: brought.unpacked_when_called / rates.dequantising / members,
        CLEARING: brought.filling / _CLEARED / members,
    }


def _read_on_host(count: float, brought: PassTraffic, rates: Rates) -> float:
    """Return how long the host's products take to read so many bytes, ``multiplied`` ones at their own rate."""
    multiplied = min(count, brought.multiplied)
    return (count - multiplied) / rates.host + multiplied / (rates.multiplying or rates.host)


def crossing_seconds(output_bytes: int, rates: Rates) -> float:
    """Return how long activations of so many bytes are under way from one device to another."""
    return _CROSSING_SECONDS + output_bytes / rates.slowest_link


def _read_on_devices(brought: PassTraffic, rates: Rates) -> float:
    """Return the bytes that accelerators read one after the other, or one of them in all if that is more.

    They compute in turn, each with what it holds and keeps, and what came; what one unpacks it does meanwhile. Of a
    memory with a rate of its own it is what another one reads in that time.
    """
    resident = Counter({device: count for device, count in brought.resident.items() if isinstance(device, int)})
    kept = Counter({device: count for device, count in brought.kept_moves.items() if device != CPU})
    read = Counter({device: count for device, count in brought.used.items() if device != CPU}) + resident + kept
    slower = {device: rates.device / rates.device_of(device) for device in [*read, *brought.moved]}
    total = sum(count * slower[device] for device, count in read.items())
    own = ((read[device] + count / brought.members) * slower[device] for device, count in brought.moved.items())
    return max([total, *own])


def link_seconds(brought: PassTraffic, rates: Rates) -> float:
    """Return how long the links take for a pass: the slowest, what they share, or all that comes one after the other.

    That is what is asked for one layer at a time, or what no reserve has room for before its run. Reserves have room
    for what is used; of what is unpacked there the share of it counts that comes over the link. Bytes of a link with a
    rate of its own count as those that another one brings in their time.
    """
    slower = _slower_links(brought, rates)
    links = {device: count * slower[device] for device, count in brought.links.items()}
    runs = [(device, count * slower.get(device, 1)) for device, count in brought.link_runs]
    ahead: Counter[DeviceId] = Counter()
    for device, count in runs:
        ahead[device] += count  # type: ignore[assignment]
    in_turn = sum(count - ahead.get(device, 0) for device, count in links.items())
    rooms = {device: count * slower.get(device, 1) for device, count in (brought.reserves or {}).items()}
    rooms = {device: count * brought.link_shares.get(device, 1) for device, count in rooms.items()}
    late = 0.0 if brought.reserves is None else late_bytes(runs, rooms)
    together = sum(brought.links.values()) / rates.root if rates.root else 0.0
    return max(max([*links.values(), in_turn, late], default=0.0) / rates.host_to_device, together)


def _slower_links(brought: PassTraffic, rates: Rates) -> dict[DeviceId, float]:
    """Return how many times as long as ``rates.host_to_device`` the link of each accelerator takes."""
    devices = [*brought.used, *(device for device, _ in brought.runs)]
    return {device: rates.host_to_device / rates.link_of(device) for device in devices if device != CPU}


def waiting_seconds(brought: PassTraffic, rates: Rates, host_seconds: float) -> float:
    """Return how long accelerators wait in a pass for which the host computes so many ``host_seconds``.

    While the host or another accelerator is at it, each link runs ahead as far as its one of ``reserves``. What can't
    come ahead is waited for.
    """
    shares, slower = brought.link_shares, _slower_links(brought, rates)
    runs = [(device, count * slower.get(device, 1)) for device, count in brought.link_runs]
    read = sum(count for device, count in runs if device == CPU)
    ahead = dict.fromkeys((device for device, _ in runs if device != CPU), 0.0)
    reserves = brought.reserves or {}
    room = {device: reserves.get(device, math.inf) * shares.get(device, 1) * slower[device] for device in ahead}
    waited = 0.0
    for _ in range(_STEADY if read else 0):
        waited = 0.0
        for device, count in runs:
            late = 0.0 if device == CPU else max(0.0, count - ahead[device]) / rates.host_to_device
            seconds = host_seconds * count / read if device == CPU else late
            for other in ahead:
                came = min(room[other], ahead[other] + seconds * rates.host_to_device)
                ahead[other] = max(0.0, ahead[other] - count) if other == device else came
            waited += late
    links = sum(count * slower[device] for device, count in brought.links.items())
    in_turn = links - sum(count for device, count in runs if device != CPU)
    return waited + max(0.0, in_turn) / rates.host_to_device


def late_bytes(runs: Sequence[tuple[DeviceId, float]], reserves: Mapping[DeviceId, float]) -> float:
    """Return what of each of ``runs`` on accelerators finds no room there before it begins, all together.

    The last run of a token and the first of the next are one, if they are on one device.
    """
    turns = [(device, count) for device, count in runs if device != CPU]
    if len({device for device, _ in turns}) < 2:
        return 0.0
    if turns[0][0] == turns[-1][0]:
        device, count = turns.pop()
        turns[0] = device, turns[0][1] + count
    return sum(max(0.0, count - reserves.get(device, 0)) for device, count in turns)


def slowest(seconds: Mapping[str, float]) -> tuple[str, float]:
    """Return what bounds a token, of its ``seconds``, and how long it takes if all overlaps that can.

    Layers compute one after another, on the host and on accelerators. Where the host computes, the same cores unpack.
    What accelerators wait for beside the host comes while they compute. Of what is done one after the other the longest
    bounds a token.
    """
    others = (IDLE, BRINGING, ROUTED, DEQUANTISING_ROUTED, CLEARING)
    last = {part: count for part, count in seconds.items() if part not in others}
    last["storage"] += seconds[IDLE]
    host = max(HOST, HOST_CORES, key=seconds.__getitem__)
    apart = max(_APART, key=seconds.__getitem__)
    for parts in [(host, apart, CROSSING), *([(host, DEQUANTISING)] if seconds[HOST] else [])]:
        longest = max(parts, key=seconds.__getitem__)
        last[longest] = max(last[longest], sum(seconds[part] for part in parts))
    bound = max(last, key=last.__getitem__)
    return bound, last[bound]


def expected_seconds(seconds: Mapping[str, float]) -> float:
    """Return how long a token takes of which so many ``seconds`` are each thing's.

    That is more than what ``slowest`` has: experts are read and unpacked when they are called, and what overlaps on the
    host takes from each other.
    """
    on_host = max(seconds[HOST], seconds[HOST_CORES])
    computing, unpacked_ahead = on_host + seconds[BRINGING], seconds[DEQUANTISING] - seconds[DEQUANTISING_ROUTED]
    in_turn = on_host + max(map(seconds.__getitem__, _APART)) + seconds[CROSSING]
    unpacking = seconds[DEQUANTISING_ROUTED] * (_UNPACKING_WHEN_CALLED if seconds[HOST] else 1)
    in_turn += _together(seconds[ROUTED], unpacking) + seconds[CLEARING]
    if seconds[HOST]:
        in_turn += seconds[BRINGING] + unpacked_ahead + _DISTURBANCE * min(unpacked_ahead, computing)
    beside_reading = min(seconds["storage"] - seconds[ROUTED], computing + seconds[DEQUANTISING])
    return max(slowest(seconds)[1], in_turn) + _DISTURBANCE * beside_reading


def _together(one: float, other: float) -> float:
    """Return how long two take that go on at once and disturb each other."""
    return max(one, other) + _DISTURBANCE * min(one, other)


def forwards_for_free(seconds: Mapping[str, float], members: float) -> float:
    """Return how many forwards of one token compute while the weights for a pass are brought.

    ``seconds`` are a token's, of which a pass has ``members``.
    """
    computing = seconds[HOST] + max(seconds[DEVICE], seconds[LAUNCHING]) + seconds[CROSSING]
    waiting = max(seconds["storage"], seconds[HOST_TO_DEVICE])
    if seconds[HOST]:  # the cores that compute unpack too
        waiting = max(0.0, waiting - seconds[DEQUANTISING])
    return members * max(waiting, 0 if seconds[HOST] else seconds[DEQUANTISING]) / computing if computing else 0.0
