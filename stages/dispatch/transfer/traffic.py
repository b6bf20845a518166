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

    def add(self, other: LinkTraffic) -> None:
        """Count ``other`` too."""
        self.bytes += other.bytes
        self.stall_seconds += other.stall_seconds


@dataclass(slots=True)
class Traffic:
    """What streaming has cost so far.

    ``streamed_bytes`` were brought to where they compute, counted as they rest, ``storage_bytes`` of them read from
    storage; ``link_bytes`` were copied to an accelerator for it, as they crossed the link. Forwards waited
    ``stall_seconds``; reads waited ``link_seconds``, summed over the threads, until the link had taken what was read
    before. ``overflow_bytes`` is the most that lay outside the staging memory at once. Experts that tokens were routed
    to lay in a slot ``expert_hits`` times, counted once a call of their layer, and were brought ``expert_misses``
    times. ``links`` has what fell to each device that computes something of what streams. What accelerators have waited
    is known later: ``late`` counts what is known by now.
    """

    streamed_bytes: int = 0
    storage_bytes: int = 0
    link_bytes: int = 0
    stall_seconds: float = 0.0
    link_seconds: float = 0.0
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
        found = self.links.get(device)
        if found is None:
            found = self.links[device] = LinkTraffic()
        return found

    def copy(self) -> Traffic:
        """Return it as it is now: it goes on counting."""
        self.settle()
        return replace(self, links={device: replace(link) for device, link in self.links.items()}, late=[])

    def settle(self) -> None:
        """Count what accelerators have waited by now."""
        for count in self.late:
            count()

    def since(self, before: Traffic) -> dict[DeviceId, LinkTraffic]:
        """Return what fell to each device since it was as ``before``."""
        nothing = LinkTraffic()
        earlier = {device: before.links.get(device, nothing) for device in self.links}
        return {
            device: LinkTraffic(link.bytes - earlier[device].bytes, link.stall_seconds - earlier[device].stall_seconds)
            for device, link in self.links.items()
        }
