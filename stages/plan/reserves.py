"""What each device needs room for of what is streamed to it: a layer's, so that what comes next is on its way while one
part computes, and the least that works.

Weights that not even that can hold whole are brought by blocks of rows, where the bits allow it: a linear layer's
product is computed a block of its weight's rows at a time. So the least memory isn't the largest weight (a head of 128k
words), and falls to the largest block or to the largest part that can't be divided. Where the reserve can hold a
weight, it comes whole: blocks cost a call each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from offstage.stages.empty_init.skeleton import TensorSpec, parent
from offstage.stages.machine.row_products import LEAST_ROWS
from offstage.stages.plan.expert_slots import ROOMY
from offstage.stages.plan.lasting_parts import place_lasting
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.serving import Line
from offstage.stages.units import CPU, DEVICE_ALIGNMENT, DeviceId


def needed_rooms(
    outline: Outline, streamed: Iterable[Line], sizes: Mapping[str, int]
) -> tuple[Counter[DeviceId], Counter[DeviceId]]:
    """Return the bytes of the largest layer that each device computes of what is ``streamed``, and the least that it
    can keep.

    That is the largest part, where each is alone while its module runs: a part is what one module holds, so much of
    each tensor at once as ``sizes`` say; where several are there together, it is what these take. Where no
    rehearsal saw how it is, and where experts are modules in a list, it is as much as for a layer. What is there
    beside a layer counts.
    """
    together: dict[tuple[str, DeviceId], dict[str, None]] = {}
    whole: dict[str, Counter[DeviceId]] = defaultdict(Counter)
    parts: dict[str, Counter[DeviceId]] = whole if sizes is outline.sizes else defaultdict(Counter)
    for line in streamed:
        together.setdefault((line.layer, line.computes), {})[line.leader] = None
        module = parent(line.name)
        whole[module][line.computes] += line.used
        if parts is not whole:
            divided = sizes[line.name] < line.used
            parts[line.name if divided else module][line.computes] += sizes[line.name]
    layers = _largest({device: _at_once(outline, leaders)} for (_, device), leaders in together.items())
    if outline.skeleton.unrehearsed is not None:
        return layers, layers
    layers = _largest([layers, *whole.values()])  # a module that isn't kept whole is a layer for each tensor
    beside = _beside(outline, whole)
    least = _least_staging(outline, whole) if beside else _largest(whole.values())
    kept = (layers + beside) | least
    if outline.listed:
        return kept, kept
    return kept, _least_staging(outline, parts) if parts.keys() - whole.keys() else least


def _largest(counts: Iterable[Mapping[DeviceId, int]]) -> Counter[DeviceId]:
    """Return the most that one of ``counts`` has on each device. (Placements are tried by thousands, of ten thousand
    parts: as many new counters take most of a plan's time.)
    """
    largest: Counter[DeviceId] = Counter()
    for sizes in counts:
        for device, size in sizes.items():
            if size > largest[device]:
                largest[device] = size
    return +largest


def _at_once(outline: Outline, leaders: Iterable[str]) -> int:
    """Return the most bytes of the tensors ``leaders`` of one layer that there must be room for at once.

    Experts that are modules in a list are called one after the other: two may be there.
    """
    whole, experts = 0, Counter[str]()
    for leader in leaders:
        if leader in outline.listed:
            experts[outline.skeleton.expert_of[parent(leader)]] += outline.sizes[leader]
        else:
            whole += outline.sizes[leader]
    return whole + sum(sorted(experts.values())[-ROOMY:])


def _beside(outline: Outline, parts: Mapping[str, Counter[DeviceId]]) -> Counter[DeviceId]:
    """Return the most bytes of streamed ``parts`` that are there together, beside the largest, on each device.

    A part is there while its module runs, or one that borrows its weights; those of modules around that are there too.
    """
    callers: dict[str, list[Counter[DeviceId]]] = {}
    for module, sizes in parts.items():
        for caller in (module, *outline.skeleton.borrowers.get(module, ())):
            callers.setdefault(caller, []).append(sizes)
    largest: Counter[DeviceId] = Counter()
    for caller in callers:
        around = outline.around[caller]
        if len(around) == len(callers[caller]) == 1:
            continue
        running = [sizes for above in around for sizes in callers.get(above, ())]
        for device in set().union(*running) if len(running) > 1 else ():
            together = [sizes[device] for sizes in running]
            largest[device] = max(largest[device], sum(together) - max(together))
    return +largest


def _least_staging(outline: Outline, parts: Mapping[str, Counter[DeviceId]]) -> Counter[DeviceId]:
    """Return the least bytes that hold whatever is there at once of streamed ``parts``, on each device.

    Each begins where that device has parts begin; what rests of the host's is on top of its staging memory.
    """
    by_device: dict[DeviceId, dict[str, int]] = {}
    for name, sizes in parts.items():
        for device, size in sizes.items():
            by_device.setdefault(device, {})[name] = size
    return Counter(
        {
            device: place_lasting(
                {name: (name, *outline.skeleton.borrowers.get(name, ())) for name in sizes},
                sizes,
                alignment=1 if device == CPU else DEVICE_ALIGNMENT,
            ).least
            for device, sizes in by_device.items()
        }
    )


def divisible(outline: Outline) -> frozenset[str]:
    """Return the weights that can be brought by blocks of rows: products in their dtype are ``exact`` so, or they are
    multiplied as they rest, which always is.

    They are those of linear layers that nobody else reads. What rests packed is one where its rows can be had alone.
    """
    possible, multiplied = list(_possible(outline)), outline.multiplied
    exact = outline.exact() if outline.exact and any(spec.name not in multiplied for spec in possible) else ()
    return frozenset(spec.name for spec in possible if spec.dtype in exact or spec.name in multiplied)


def may_divide(outline: Outline) -> bool:
    """Return whether any weight can be brought by blocks of rows; it isn't asked in which dtypes products are exact."""
    return any(outline.exact is not None or spec.name in outline.multiplied for spec in _possible(outline))


def possible_dtypes(outline: Outline) -> list[str]:
    """Return the dtypes of the weights that can be brought by blocks of rows if products in these are exact."""
    return sorted({spec.dtype for spec in _possible(outline) if spec.name not in outline.multiplied})


def _possible(outline: Outline) -> Iterator[TensorSpec]:
    borrowed = outline.skeleton.borrowers.keys() | outline.skeleton.expert_of.keys()
    for module in outline.skeleton.modules:
        multiplies = module.multiplies or module.multiplies_packed
        spec = outline.skeleton.by_name.get(f"{module.name}.weight") if multiplies else None
        if spec is None or module.name in borrowed or spec.shape[0] <= LEAST_ROWS:
            continue
        if spec.packed is None or spec.packed.by_row:
            yield spec


def least_sizes(outline: Outline) -> dict[str, int]:
    """Return the bytes of every tensor that there must be room for at once, by name: of what is divisible a block."""
    return outline.sizes | {name: LEAST_ROWS * _row_bytes(outline, name) for name in divisible(outline)}


def block_sizes(outline: Outline, rows: Mapping[str, int]) -> dict[int, int]:
    """Return the bytes of the weights that come by blocks of so many ``rows``, and those of a block.

    Of weights of the same bytes, which may have rows of different lengths, it is the largest block.
    """
    sizes: dict[int, int] = {}
    for name, count in rows.items():
        size = outline.sizes[name]
        sizes[size] = max(sizes.get(size, 0), count * _row_bytes(outline, name))
    return sizes


def least_blocks(outline: Outline) -> dict[int, int]:
    """Return the ``block_sizes`` at the least; it isn't asked in which dtypes products are exact so."""
    return block_sizes(outline, {spec.name: LEAST_ROWS for spec in _possible(outline)})


def block_rows(
    outline: Outline,
    brought: Collection[str],
    execution: Mapping[str, DeviceId],
    reserves: Mapping[DeviceId, int],
    *,
    least: bool = False,
) -> dict[str, int]:
    """Return how many rows of a weight come at a time, for those of ``brought`` whose module has more than the reserve.

    ``execution`` has where each module computes, ``reserves`` what each device keeps free. The next block comes while
    one computes, so they are doubled as long as two have room; they are the ``least`` where a product with one is to
    take little beside it.
    """
    modules: dict[str, list[str]] = {}
    for name in brought:
        modules.setdefault(parent(name), []).append(name)
    rows_of: dict[str, int] = {}
    for module, names in modules.items():
        room = reserves.get(execution[module], 0)
        if sum(outline.sizes[name] for name in names) <= room:
            continue
        divided = divisible(outline).intersection(names)
        beside = sum(outline.sizes[name] for name in names if name not in divided)
        left = 0 if least else room - beside
        for name in (name for name in names if name in divided):
            rows_of[name] = LEAST_ROWS
            while 4 * rows_of[name] * _row_bytes(outline, name) <= left:
                rows_of[name] *= 2
    return rows_of


def _row_bytes(outline: Outline, name: str) -> int:
    return outline.sizes[name] // outline.skeleton.by_name[name].shape[0]
