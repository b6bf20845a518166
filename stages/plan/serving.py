"""How each tensor that doesn't lie where it computes is served there: decided here, once, for all that comes later.

A tensor is **resident** where it computes, and not served at all; **streamed**, brought in for each use; **looked
up**, which brings a few of its rows; or one of a mixture's **experts**, of which those are brought that tokens are
routed to, and kept in slots. Which it is follows from where it lies, where its module computes, and what kind of module
that is. Nothing but ``storage.io`` is left to choose: whether the host reads what lies on disk into staging memory, or
uses it where a map of its file has it. What rests packed is of no use in a map: it is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Literal, NamedTuple

from offstage.stages.empty_init.skeleton import parent
from offstage.stages.units import CPU, DeviceId

Serving = Literal["direct", "map", "rows", "copy", "packed", "experts"]
"""``direct``: read from disk past the page cache, for each use. ``map``: used where a map of its file has it. ``rows``:
looked up in such a map. ``copy``: it waits in memory, and is copied over a link for each use. ``packed``: it waits in
memory as it rests on disk, and is unpacked for each use. ``experts``: an expert's row is brought from wherever the
tensor waits, once tokens are routed to it and no slot has it."""

Io = Literal["direct", "mmap"]

SHARE_OF_FREE_MEMORY = 0.8
"""The most of the free memory that mapped weights may fill with their pages, before direct reads are the better way."""


def choose_io(asked: str, *, streamed_bytes: int, free_bytes: int) -> Io:
    """Return how the host reads what is streamed: as asked, or for ``auto`` mapped where the pages can stay in memory.

    Page cache isn't the process's own memory, so it stands beside the budget; but pages that don't fit would be read
    again for every token, and through the cache that is slower than directly.
    """
    if asked != "auto":
        return "mmap" if asked == "mmap" else "direct"
    return "mmap" if streamed_bytes <= SHARE_OF_FREE_MEMORY * free_bytes else "direct"


def is_streamed(serving: Serving | None) -> bool:
    """Return whether all of the tensor is brought in for each use."""
    return serving not in (None, "rows", "experts")


class Line(NamedTuple):
    """One tensor by its ``name``, tied ones included: where it lies, ``bytes`` there, and where it computes, ``used``.

    ``serving`` is how it gets there, null where it is resident. The bytes of tied ones are those of their ``leader``.
    ``codec`` is what it lies packed by, as it rests on disk, null where it lies as it is used. ``made`` says that the
    model's constructor makes it, on the host, where the placement has it on disk. ``routed`` says, where that is
    experts of which a token uses some, of how many it uses how many.
    """

    name: str
    home: DeviceId
    computes: DeviceId
    bytes: int
    used: int
    leader: str = ""
    layer: str = ""
    serving: Serving | None = None
    codec: str | None = None
    made: bool = False
    routed: tuple[int, int] | None = None

    @property
    def at_rest(self) -> bool:
        """Whether it lies packed, as it rests on disk."""
        return self.codec is not None

    @property
    def is_streamed(self) -> bool:
        """Whether all of it is brought in for each use."""
        return is_streamed(self.serving)

    @property
    def is_unpacked(self) -> bool:
        """Whether it is unpacked for each use."""
        return self.at_rest and self.serving in ("direct", "packed", "experts")


class TensorTable(ABC):
    """A line for each tensor, and what else is read from the lines, whoever has them: a layout, or a plan on disk."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, Line]:
        """The line of every tensor by its name, tied ones included, in the order of execution."""

    @cached_property
    def homes(self) -> dict[str, DeviceId]:
        """Where each tensor lies."""
        return {name: line.home for name, line in self.tensors.items()}

    @cached_property
    def execution(self) -> dict[str, DeviceId]:
        """Where each module computes that holds tensors itself."""
        return {parent(name): line.computes for name, line in self.tensors.items()}

    @cached_property
    def serving(self) -> dict[str, Serving]:
        """How each tensor gets to where it computes that isn't resident there."""
        return {name: line.serving for name, line in self.tensors.items() if line.serving is not None}

    def layers_on_host(self, main: DeviceId) -> tuple[str, ...]:
        """Return the layers that compute on the host because they lie there, where ``main`` is an accelerator."""
        on_host = (line.layer for line in self.tensors.values() if line.computes == CPU != main)
        return tuple(dict.fromkeys(on_host))
