"""Which tensors of layers are streamed to one device, so that the least is.

Of each layer at most the reserve may stream, and of which tensors that is, is a subset-sum problem for each kind of
layer. Some reserves are tried: the smallest that works isn't always the one that wastes least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from offstage.stages.empty_init.skeleton import parent
from offstage.stages.plan.outline import Layer, Outline
from offstage.stages.plan.policies.even_choice import fitting
from offstage.stages.plan.policies.subset_sums import subset_sums

_TRIES = 8
"""How many reserves are tried beyond the least that works: a larger one can waste less of the budget."""
_PARTS, _PARTS_PACKED = 2, 4
"""How many of the largest parts are to have room at once: one computes while others are read, or read and unpacked."""


def least_streamed(outline: Outline, layers: Sequence[Layer], room: int, *, alone: bool = True) -> set[str] | None:
    """Return the tensors to stream, so that the others and the staging memory fit into ``room`` bytes, or null.

    The staging memory is to hold two of the largest parts, so that one is read while the other computes, or four where
    what rests packed is unpacked meanwhile; where only a single layer's worth fits, that. Where the device isn't
    ``alone`` it is enough: what comes next is read while others compute.
    """
    shapes = [_shape(outline, layer) for layer in layers]
    kinds = {shape: subset_sums([size for size, _ in shape]) for shape in dict.fromkeys(shapes)}
    total, counts = sum(layer.bytes for layer in layers), Counter(shapes)
    parts = _PARTS_PACKED if any(name in outline.packed for layer in layers for name in layer.owned) else _PARTS
    roomy: list[set[str]] = []
    tight: list[set[str]] = []
    for reserve in sorted({count for kind in kinds.values() for count in kind.sums}):
        most = sum(count * kinds[shape].largest(reserve) for shape, count in counts.items())
        spare = room - reserve - (total - most)
        if spare < 0:
            continue
        chosen = {shape: kind.within(reserve) for shape, kind in kinds.items()}
        away = {layer.owned[place] for layer, shape in zip(layers, shapes, strict=True) for place in chosen[shape]}
        extra = max(0, _largest_parts(chosen, counts, parts) - reserve) if alone else 0
        found = roomy if extra <= spare else tight
        if len(found) < _TRIES:
            found.append(away - fitting(outline, away, max(0, spare - extra)))
        if len(roomy) == _TRIES:
            break
    return min(roomy or tight, key=lambda away: sum(outline.rest_sizes[name] for name in away), default=None)


Shape = tuple[tuple[int, int], ...]
"""A layer's tensors: the size of each, and the number of the module in the layer that holds it."""


def _shape(outline: Outline, layer: Layer) -> Shape:
    modules = list(dict.fromkeys(map(parent, layer.owned)))
    return tuple((outline.sizes[name], modules.index(parent(name))) for name in layer.owned)


def _largest_parts(chosen: Mapping[Shape, frozenset[int]], counts: Mapping[Shape, int], most: int) -> int:
    """Return the bytes of the ``most`` largest parts, where ``chosen`` are the positions streamed of each shape.

    A part is what streams together: the tensors of one module.
    """
    parts: list[int] = []
    for shape, places in chosen.items():
        held: Counter[int] = Counter()
        for size, module in (shape[place] for place in places):
            held[module] += size
        parts += list(held.values()) * min(most, counts[shape])
    return sum(sorted(parts)[-most:])
