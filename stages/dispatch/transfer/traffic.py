"""What streaming has cost so far: bytes by where they came from and went to, and how long forwards waited."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from offstage.stages.units import DeviceId


@dataclass(slots=True)
class LinkTraffic:
    """What streaming has brought to one device so far, and how long forwards waited for it there.

    The ``bytes`` count once for each use: to an accelerator as they cross its link, to the host as they rest.
    """

    bytes: int = 0
    stall_seconds: float = 0.0


_SUMS = ("streamed_bytes", "storage_bytes", "link_bytes", "stall_seconds", "expert_hits", "expert_misses")


@dataclass(slots=True)
class Traffic:
    """What streaming has cost so far.

    ``streamed_bytes`` were brought to where they compute, counted as they rest, ``storage_bytes`` of them read from
    storage; ``link_bytes`` were copied to an accelerator for it, as they crossed the link. Forwards waited
    ``stall_seconds``. ``overflow_bytes`` is the most that lay outside the staging memory at once. Experts that tokens
    were routed to lay in a slot ``expert_hits`` times, counted once a call of their layer, and were brought
    ``expert_misses`` times. ``links`` has what fell to each device that computes something of what streams. What
    accelerators have waited is known later: ``late`` counts what is known by now.
    """

    streamed_bytes: int = 0
    storage_bytes: int = 0
    link_bytes: int = 0
    stall_seconds: float = 0.0
    overflow_bytes: int = 0
    expert_hits: int = 0
    expert_misses: int = 0
    links: dict[DeviceId, LinkTraffic] = field(default_factory=dict)
    late: list[Callable[[], None]] = field(default_factory=list, repr=False, compare=False)

    def count_use(self, device: DeviceId, *, at_rest: int, carried: int) -> None:
        """Count a use on ``device`` of what rests in so many bytes, of which so many were ``carried`` there."""
        self.streamed_bytes += at_rest
        self._link(device).bytes += carried

    def count_stall(self, device: DeviceId, seconds: float) -> None:
        """Count the ``seconds`` that a forward waited for something to come to ``device``."""
        self.stall_seconds += seconds
        self._link(device).stall_seconds += seconds

    def _link(self, device: DeviceId) -> LinkTraffic:
        link = self.links.get(device)
        if link is None:
            link = self.links[device] = LinkTraffic()
        return link

    def copy(self) -> Traffic:
        """Return it as it is now: it goes on counting."""
        self.settle()
        return replace(self, links={device: replace(link) for device, link in self.links.items()}, late=[])

    def settle(self) -> None:
        """Count what accelerators have waited by now."""
        for count in self.late:
            count()

    def since(self, before: Traffic) -> Traffic:
        """Return what was counted since it was as ``before``; of what lay outside the staging memory all there was."""
        counted = Traffic(overflow_bytes=self.overflow_bytes)
        for name in _SUMS:
            setattr(counted, name, getattr(self, name) - getattr(before, name))
        for device, link in self.links.items():
            earlier = before.links.get(device, LinkTraffic())
            counted.links[device] = LinkTraffic(link.bytes - earlier.bytes, link.stall_seconds - earlier.stall_seconds)
        return counted

    def add(self, other: Traffic) -> None:
        """Count ``other`` too."""
        self.overflow_bytes = max(self.overflow_bytes, other.overflow_bytes)
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for device, link in other.links.items():
            mine = self._link(device)
            mine.bytes, mine.stall_seconds = mine.bytes + link.bytes, mine.stall_seconds + link.stall_seconds

    @property
    def expert_hit_rate(self) -> float | None:
        """How often experts lay in a slot as tokens were routed to them; null where none that wait were called for."""
        calls = self.expert_hits + self.expert_misses
        return self.expert_hits / calls if calls else None
