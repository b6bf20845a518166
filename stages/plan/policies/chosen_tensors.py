"""Choosing tensors: those that fit, from all over the order of execution, and those that must stream, so that the least
does.

Of each layer at most the reserve may stream, and of which tensors that is, is a subset-sum problem for each kind of
layer. Some reserves are tried: the smallest that works isn't always the one that wastes least.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from offstage.stages.empty_init.skeleton import parent
from offstage.stages.plan.outline import PARTS, PARTS_UNPACKED, Layer, Outline, read_on
from offstage.stages.plan.placement import Budgets
from offstage.stages.units import CPU, DISK, DeviceId

GOLDEN = 0.6180339887498949
_MOST_SUMS = 2048
"""How many subset sums of one layer are kept; a layer with more of them is solved approximately."""
_TRIES = 8
"""How many reserves are tried beyond the least that works: a larger one can waste less of the budget."""


def total_bytes(outline: Outline, names: Iterable[str]) -> int:
    """Return the bytes of ``names`` together, as they are used."""
    return sum(outline.sizes[name] for name in names)


def turns(count: int) -> list[float]:
    """Return a number for each of ``count`` places: taken in that order, they are from all over at any moment.

    Steps by the golden ratio never bunch.
    """
    return [index * GOLDEN % 1 for index in range(count)]


def fitting(outline: Outline, names: Iterable[str], room: int, *, at_rest: bool = False) -> set[str]:
    """Return those of ``names`` that fit into ``room`` bytes together, as they are used or ``at_rest``: the largest
    are taken first.

    Among equals they are taken from all over the order of execution.
    """
    taken: set[str] = set()
    sizes = outline.rest_sizes if at_rest else outline.sizes
    chosen = set(names)
    ordered = [name for layer in outline.layers for name in layer.owned if name in chosen]
    turn = dict(zip(ordered, turns(len(ordered)), strict=True))
    for name in sorted(ordered, key=lambda name: (-sizes[name], turn[name])):
        if sizes[name] <= room:
            taken.add(name)
            room -= sizes[name]
    return taken


def below(outline: Outline, names: Sequence[str], main: DeviceId, budgets: Budgets) -> dict[str, DeviceId]:
    """Return where streamed tensors wait: on the host as far as it goes, the rest on disk, evenly in between.

    The shares are kept even by error diffusion along the order of execution: storage and link work side by side.
    """
    room = budgets.get(CPU, 0) if main != CPU else 0
    total = total_bytes(outline, names)
    if room is None or room >= total:
        return dict.fromkeys(names, CPU)
    homes: dict[str, DeviceId] = dict.fromkeys(names, DISK)
    passed = on_host = 0
    for name in names:
        size = outline.sizes[name]
        passed += size
        if on_host + size <= room * passed / total:
            homes[name], on_host = CPU, on_host + size
    late = [name for name in names if homes[name] == DISK]
    return {**homes, **dict.fromkeys(fitting(outline, late, room - on_host), CPU)}


def least_streamed(
    outline: Outline, layers: Sequence[Layer], room: int, *, alone: bool = True, reads_on: bool = False
) -> list[set[str]]:
    """Return the tensors to stream, so that the others and the staging memory fit into ``room`` bytes, if they can.

    They are the fewest bytes that were found, and beside them the fewest tensors, where those are others: each that is
    brought takes a while, however small it is.

    The staging memory is to hold two of the largest parts, so that one is read while the other computes, or four where
    what rests packed is unpacked meanwhile; where only a single layer's worth fits, that. Where the device isn't
    ``alone`` it is enough: what comes next is read while others compute. If it ``reads_on``, it is to hold what lets
    reading go on while the largest part is in use.
    """
    shapes = [_shape(outline, layer) for layer in layers]
    kinds = {shape: subset_sums([size for size, _ in shape]) for shape in dict.fromkeys(shapes)}
    total, counts = sum(layer.bytes for layer in layers), Counter(shapes)
    parts = PARTS_UNPACKED if any(name in outline.packed for layer in layers for name in layer.owned) else PARTS
    roomy: list[set[str]] = []
    tight: list[set[str]] = []
    few = {count for shape in kinds for count in _sums_of_few(shape)}
    for reserve in sorted({count for kind in kinds.values() for count in kind.sums}):
        if len(roomy) >= _TRIES and reserve not in few:
            continue
        most = sum(count * kinds[shape].largest(reserve) for shape, count in counts.items())
        spare = room - reserve - (total - most)
        if spare < 0:
            continue
        chosen = {shape: kind.within(reserve) for shape, kind in kinds.items()}
        away = {layer.owned[place] for layer, shape in zip(layers, shapes, strict=True) for place in chosen[shape]}
        sizes = {shape: _parts(shape, places) for shape, places in chosen.items()}
        largest = sorted(size for shape, each in sizes.items() for size in each * min(parts, counts[shape]))[-parts:]
        ahead = [sum(largest)] if alone else []
        ahead += [needed for _, needed in read_on(sizes[shape] for shape in shapes)] if reads_on else []
        extra = max(0, max(ahead, default=0) - reserve)
        tries = roomy if extra <= spare else tight
        if len(tries) < _TRIES or reserve in few:
            tries.append(away - fitting(outline, away, max(0, spare - extra)))
    ranked = sorted(roomy or tight, key=lambda away: sum(outline.rest_sizes[name] for name in away))
    if not ranked:
        return []
    fewest = min(ranked, key=len)
    return [fewest] if fewest == ranked[0] else [ranked[0], fewest]


Shape = tuple[tuple[int, int], ...]
"""A layer's tensors: the size of each, and the number of the module in the layer that holds it."""


def _shape(outline: Outline, layer: Layer) -> Shape:
    modules = list(dict.fromkeys(map(parent, layer.owned)))
    return tuple((outline.sizes[name], modules.index(parent(name))) for name in layer.owned)


def _sums_of_few(shape: Shape) -> set[int]:
    """Return the bytes of each tensor of a layer, and of its largest ones together."""
    sizes = sorted((size for size, _ in shape), reverse=True)
    return {*sizes, *accumulate(sizes)}


def _parts(shape: Shape, places: Iterable[int]) -> list[int]:
    """Return the bytes of each part at ``places`` of a layer: what one module holds streams together."""
    by_module: Counter[int] = Counter()
    for size, module in (shape[place] for place in places):
        by_module[module] += size
    return [*by_module.values()]


@dataclass(frozen=True, slots=True)
class SubsetSums:
    """The subset sums of a layer's tensors, ascending, each with the positions of the tensors that make it."""

    sums: Sequence[int]
    members: Sequence[frozenset[int]]

    def largest(self, limit: int) -> int:
        """Return the largest sum that is at most ``limit``."""
        return self.sums[bisect_right(self.sums, limit) - 1]

    def within(self, limit: int) -> frozenset[int]:
        """Return the positions of the tensors that make the largest sum that is at most ``limit``."""
        return self.members[bisect_right(self.sums, limit) - 1]


def subset_sums(sizes: Sequence[int]) -> SubsetSums:
    """Return all sums of subsets of ``sizes``, or ``_MOST_SUMS`` of them, spread evenly, where there are more."""
    sums: dict[int, frozenset[int]] = {0: frozenset()}
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        sums |= {total + sizes[place]: chosen | {place} for total, chosen in sums.items()} | sums
        if len(sums) > _MOST_SUMS:
            every = sorted(sums)
            step = len(every) / _MOST_SUMS
            sums = {every[int(index * step)]: sums[every[int(index * step)]] for index in range(_MOST_SUMS)}
    whole = sum(sizes)
    sums[whole] = frozenset(range(len(sizes)))
    return SubsetSums(tuple(sorted(sums)), tuple(sums[total] for total in sorted(sums)))
