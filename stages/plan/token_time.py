"""How long a token takes, by the bytes that move for it.

Decoding is bound by the movement of weights: each token reads the resident weights once from the memory they lie in,
and the streamed ones once from where they wait. Reading ahead overlaps these, so a token takes as long as the slowest
of storage, link and memory (the roofline argument, with bytes in place of operations). What rests packed is read in
fewer bytes, and takes the cores that unpack it: the cores that compute, where the host does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from stages.machine.rates import Rates
from stages.units import CPU, DISK, DeviceId

HOST, UNPACKING = "host memory", "unpacking"


@dataclass(slots=True)
class Brought:
    """What a pass brings to where it is used, in bytes: as it rests, by where it waits; of these those ``packed``.

    ``unpacked`` is what these come to.
    """

    at_rest: Counter[DeviceId] = field(default_factory=Counter)
    packed: float = 0
    unpacked: float = 0

    def add(self, waits: DeviceId, rest_bytes: float, *, unpacked: float | None = None) -> None:
        """Count what waits there in ``rest_bytes``, and is used ``unpacked`` in so many; null: as it rests."""
        self.at_rest[waits] += rest_bytes  # type: ignore[assignment]
        if unpacked is not None:
            self.packed += rest_bytes
            self.unpacked += unpacked

    @property
    def bytes(self) -> float:
        """What is brought in all, as it rests."""
        return self.at_rest.total()

    @property
    def used(self) -> float:
        """The same as it is used."""
        return self.bytes - self.packed + self.unpacked


def token_seconds(
    brought: Brought,
    held: Mapping[DeviceId, int],
    *,
    main: DeviceId,
    rates: Rates,
    members: float = 1,
) -> dict[str, float]:
    """Return the seconds that a token takes storage, the link, either memory, and the cores that unpack.

    ``brought`` is for a pass, ``held`` are the bytes read on each device for a token. A pass has a token for each of
    ``members``.
    """
    on_accelerators = sum(count for device, count in held.items() if isinstance(device, int))
    apart = brought.used if main != CPU else 0
    return {
        "storage": brought.at_rest.get(DISK, 0) / rates.storage / members,
        "link": apart / rates.link / members,
        HOST: (held.get(CPU, 0) + brought.used) / rates.host if main == CPU else 0.0,
        "device memory": (on_accelerators + apart) / rates.device,
        UNPACKING: brought.unpacked / rates.unpacking / members,
    }


def slowest(seconds: Mapping[str, float]) -> tuple[str, float]:
    """Return what bounds a token, of its ``seconds``, and how long it takes.

    Where the host computes, the same cores unpack: one after the other, and the longer one bounds it.
    """
    both = max(HOST, UNPACKING, key=seconds.__getitem__)
    last = dict(seconds)
    if seconds[HOST]:
        last[both] = seconds[HOST] + seconds[UNPACKING]
    bound = max(last, key=last.__getitem__)
    return bound, last[bound]
