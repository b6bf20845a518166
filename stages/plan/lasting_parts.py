"""Where streamed parts that stay while others come and go lie in the memory that is kept free for them.

A part is there while its module runs, or one that borrows its weights. What a module around modules holds (a mixer's
own parameters) stays while those inside come and go, and wherever it lay in the midst of the memory it would leave two
gaps, each too small for a part that both could hold. So each that stays has a fixed place, as far from the memory's end
as those reach that are there with it; what is before them is one piece.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from offstage.stages.empty_init.skeleton import upward

Part = TypeVar("Part", bound=Hashable)


@dataclass(frozen=True, slots=True)
class LastingParts(Generic[Part]):
    """``places`` has how many bytes before the memory's end each lasting part begins, the farthest ``bytes`` of them.

    Memory of ``least`` bytes holds all that is ever there at once.
    """

    places: Mapping[Part, int]
    bytes: int
    least: int


def place_lasting(
    callers: Mapping[Part, Collection[str]], sizes: Mapping[Part, int], *, alignment: int = 1
) -> LastingParts[Part]:
    """Return the places of those parts that last, each of which begins at a multiple of ``alignment``.

    ``callers`` has the modules whose calls use each part, ``sizes`` its bytes.
    """
    together = _together(callers)
    inside = Counter(above for names in callers.values() for above in {up for name in names for up in upward(name)})
    lasting = {part for part, names in callers.items() if any(inside[name] > 1 for name in names)}
    beside: dict[Part, dict[Part, None]] = {}
    for parts in together:
        for part in lasting.intersection(parts):
            beside.setdefault(part, {}).update(dict.fromkeys(parts))
    places: dict[Part, int] = {}
    for part in (part for parts in together for part in parts if part in lasting):
        if part not in places:
            length = _rounded(sizes[part], alignment)
            taken = sorted((places[other] - _rounded(sizes[other], alignment), places[other])
                           for other in beside[part] if other in places)  # fmt: skip
            places[part] = length + _first_gap(taken, length)
    least = 0
    for parts in together:
        extent = max((places[part] for part in parts if part in lasting), default=0)
        passing = max((sizes[part] for part in parts if part not in lasting), default=0)
        least = max(least, extent + (_rounded(passing, alignment) if extent else passing))
    return LastingParts(places, max(places.values(), default=0), least)


def _together(callers: Mapping[Part, Collection[str]]) -> list[list[Part]]:
    """Return the parts that are there during each caller's call, the outermost first, of the outermost caller first."""
    used: dict[str, list[Part]] = {}
    for part, names in callers.items():
        for name in dict.fromkeys(names):
            used.setdefault(name, []).append(part)
    by_depth = sorted(used, key=lambda caller: len([*upward(caller)]))
    around = ([*upward(caller)][::-1] for caller in by_depth)
    return [[*dict.fromkeys(part for above in names for part in used.get(above, ()))] for names in around]


def _first_gap(taken: list[tuple[int, int]], length: int) -> int:
    """Return where the first gap of ``length`` bytes begins between spans that are ``taken``, in order."""
    begin = 0
    for low, high in taken:
        if low - begin >= length:
            break
        begin = max(begin, high)
    return begin


def _rounded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
