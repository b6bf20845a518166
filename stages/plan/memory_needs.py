"""What a request takes beside the model's weights, in bytes, and where what blocks keep of it lies.

The cache of a block lies where the block computes. What each keeps is what a rehearsal of the model showed, whatever it
keeps: keys and values of all positions or of a window, compressed ones, a state, what an encoder gave. A model whose
code refuses a rehearsal is taken to keep what its ``config.json`` makes likely, as much in each block.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from operator import mul

from offstage.pipeline.kept_memory import MAPPED_BYTES
from offstage.stages.empty_init.skeleton import CacheSpec
from offstage.stages.inputs.generate_options import KEPT_POSITIONS
from offstage.stages.machine.kernels import NOMINAL, Kernels
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.request.geometry import Geometry, Request
from offstage.stages.units import CPU, DTYPE_BYTES, DeviceId, tensor_bytes


@dataclass(frozen=True, slots=True)
class BlockCache:
    """The bytes that ``block`` keeps of a request: after the prompts' forward, and in the end.

    The first may be more: a window's keys are a view of the whole prompt's until the next token comes. They are those
    of so many ``tensors``, keys and values of each call. What ``grows``, and isn't quantised, may wait on the host, or
    what is an encoder's beside it; what ``waits`` does, and comes to where the block computes for its attention.
    """

    block: str
    prompted: int
    finished: int
    tensors: int = 2
    grows: bool = False
    waits: bool = False

    def on_host(self) -> BlockCache:
        """Return it as one that waits."""
        return replace(self, waits=True)

    @property
    def most(self) -> int:
        """The most that it is at once."""
        return max(self.prompted, self.finished)


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What a request takes on the device that computes a layer, in bytes: activations, and what blocks keep in caches.

    ``scratch_bytes`` are what the host's kernels take beside them, ``result_bytes`` what the host keeps to the end,
    and ``assistant_bytes`` what a second model takes on the main device. ``library_bytes`` are those of libraries that
    the host's process has for this model alone. ``learning_bytes`` are what a training keeps from step to step of the
    weights that learn; ``offloaded_bytes`` of an accelerator's activations wait on the host.
    """

    activation_bytes: int
    scratch_bytes: int = 0
    result_bytes: int = 0
    assistant_bytes: int = 0
    library_bytes: int = 0
    learning_bytes: int = 0
    offloaded_bytes: int = 0
    caches: tuple[BlockCache, ...] = ()

    @property
    def cache_bytes(self) -> int:
        """The most that all caches take at once."""
        return sum(cache_bytes(self.caches, lambda _: CPU).values())

    @property
    def heap_bytes(self) -> int:
        """What a host that computes every block leaves unused between their caches."""
        return heap_bytes(self.caches)

    @property
    def apart_bytes(self) -> int:
        """What of the caches is on the host whatever computes."""
        return sum(cache.most for cache in self.caches if cache.waits)

    @property
    def device_cache_bytes(self) -> int:
        """The most that all caches take at once of an accelerator that computes every block."""
        return cache_bytes(self.caches, lambda _: 0).get(0, 0)

    @property
    def bytes(self) -> int:
        """All of it."""
        parts: Iterable[int] = (getattr(self, name) for name in _PARTS)
        return self.cache_bytes + self.heap_bytes + sum(parts)

    @property
    def host_bytes(self) -> int:
        """What of it is on a host that computes."""
        return self.bytes - self.offloaded_bytes


UNUSED_SHARE = 3 / 4
"""Of keys and values so small that they lie in the C library's heap, among a prompt's activations and each time in
place of those that were a token shorter, so much is free between them, in pieces that nothing fits into. Nominal: with
one prompt 0.3 to 0.7 of them was found to be, with several one after another about as much as they are."""
COPIES = 2
"""How often an accelerator has what comes of a block's cache: as it came, and as it is used."""
_PARTS = tuple(one.name for one in fields(MemoryNeeds) if one.name != "caches")


def most(works: Iterable[MemoryNeeds]) -> MemoryNeeds:
    """Return what the one of ``works`` takes that takes the most, of each part."""
    works = list(works)
    largest = max(works, key=lambda one: one.cache_bytes)
    return replace(largest, **{name: max(getattr(one, name) for one in works) for name in _PARTS})


def memory_needs(
    outline: Outline,
    geometry: Geometry,
    request: Request,
    kernels: Kernels = NOMINAL,
    *,
    blocks: Mapping[int, int] | None = None,
) -> MemoryNeeds:
    """Return what ``request`` takes beside weights: the cache of all layers, and the widest moment of a forward.

    The moments of the prompt's forward are the rehearsal's, which asks for the logits of one position of a sequence.
    Beside them stand those of a token with a whole cache, and the logits that the request asks for. Where no rehearsal
    went on to a token, a layer's keys and values are taken to be copied as they grow, and repeated for every head.
    ``kernels`` says what those of the host take.
    ``blocks`` has the bytes of weights that are multiplied by blocks of rows, and those of a block.
    """
    dtype = compute_dtype(outline)
    width = int(DTYPE_BYTES[dtype])
    caches = block_caches(outline, geometry, request, width=width)
    layers = {"": max(1, geometry.layers)}  # of what isn't known by blocks
    calls = request.members * request.forwards
    copied = max((one.finished // layers.get(one.block, 1) for one in caches), default=0) // calls
    rehearsed = outline.skeleton.moments
    peaks = [moment.at(request.sequences, request.prompt, kernels, blocks=blocks) for moment in rehearsed]
    if not peaks:
        tokens = request.sequences * max(request.prompt, request.length)
        peaks = [
            (tokens * (6 * geometry.hidden + 2 * geometry.intermediate) * width, 0),
            (0, _scratch_bytes(outline, kernels)),
        ]
    if outline.skeleton.decoding and request.length:
        decoding = outline.skeleton.decoding
        peaks += [moment.at(request.sequences, request.length, kernels, blocks=blocks) for moment in decoding]
    else:
        peaks.append((copied + request.tokens * max(2 * geometry.hidden, geometry.expanded) * width, 0))
    peaks += [moment.at(1, 1, kernels) for moment in request.moments]
    weight = _packed_head_bytes(outline, geometry) or geometry.hidden * geometry.vocabulary * width
    factors = kernels.get(f"mm {dtype}", ())
    peaks += _logits(geometry, request, width=width, weight=weight, head=factors, blocks=blocks or {})
    activations = max(live for live, _ in peaks)
    scratch = max(map(sum, peaks)) - activations
    beside = request.members * request.sequences * request.kept * geometry.vocabulary * 4
    beside += (
        request.members * request.judged * copied // request.sequences
    )  # each has a block's keys and values in hand
    if request.cache_bits is not None and request.length:
        full = max(spec.position_bytes for spec in _specs(outline, geometry, request, width=width))
        in_hand = request.cache_bits.in_hand(width=width, calls=request.members)
        beside += round(in_hand * full * request.sequences * request.length)
    beside += (request.members - 1) * _parked_bytes(outline, request, at_most=activations)
    return MemoryNeeds(
        activations + beside,
        max(0, scratch),
        request.result_bytes,
        request.all_assistant_bytes,
        caches=caches,
    )


def _parked_bytes(outline: Outline, request: Request, *, at_most: int) -> int:
    """Return the most that a call in lockstep keeps of a prompt's forward while it waits for a product's weight."""
    products = [moment for moment in outline.skeleton.moments if moment.kernel.startswith("mm ")]
    return max((moment.before(request.sequences, request.prompt) for moment in products), default=at_most)


def _logits(
    geometry: Geometry,
    request: Request,
    *,
    width: int,
    weight: int,
    head: tuple[float, ...],
    blocks: Mapping[int, int],
) -> Iterator[tuple[int, int]]:
    """Yield the activations and the scratch of the moments that make ``request``'s logits and then take their softmax.

    They are made in the model's dtype, of ``width`` bytes, by a product whose kernel takes the factors of ``head``
    beside, of as much of the ``weight`` (bytes) as ``blocks`` says; softmax has those that it takes at once twice in
    float32.
    """
    rows = request.sequences * request.positions
    hidden, logits = rows * geometry.hidden * width, rows * geometry.vocabulary * width
    at_once = rows if request.normalised is None else min(rows, request.normalised)
    if request.positions > 1:  # of one position of each the rehearsal has the product
        block = blocks.get(weight, weight)
        part = logits * block // max(1, weight)
        beside = round(sum(map(mul, head, (hidden, block, part))))
        yield 2 * hidden + logits + (part if block < weight else 0), beside
    # A forward beside it leaves its logits, and what softmax made of them, for those that are told by both.
    yield request.forwards * (logits + at_once * geometry.vocabulary * 2 * 4), 0


def _packed_head_bytes(outline: Outline, geometry: Geometry) -> int:
    """Return the bytes of the widest weight that has a row for each word and is multiplied as it rests; 0 if none."""
    matrices = (products.parts[0] for products in outline.skeleton.products)
    return max((tensor_bytes(shape, dtype) for dtype, shape in matrices if shape[0] == geometry.vocabulary), default=0)


def _scratch_bytes(outline: Outline, kernels: Kernels) -> int:
    """Return the most that the host's kernels copy of one matrix for a product with it.

    It stands for what a rehearsal would have shown. Of stacked matrices, such as a mixture's experts, one is copied at
    a time.
    """
    matrices = (
        tensor
        for tensor in outline.skeleton.unique
        if tensor.bytes and len(tensor.shape) > 1 and tensor.name not in outline.lookups
    )
    copied = (
        tensor.bytes // math.prod(tensor.shape[:-2]) * kernels[kernel][1]
        for tensor in matrices
        if (kernel := f"mm {tensor.dtype}") in kernels
    )
    return round(max(copied, default=0))


def compute_dtype(outline: Outline) -> str:
    """Return the floating dtype that most of the model's bytes have."""
    count: Counter[str] = Counter()
    for tensor in outline.skeleton.unique:
        if tensor.dtype.startswith(("float", "bfloat")):
            count[tensor.dtype] += tensor.bytes
    return max(count, key=lambda dtype: count[dtype], default="float32")


def block_caches(outline: Outline, geometry: Geometry, request: Request, *, width: int) -> tuple[BlockCache, ...]:
    """Return what each block keeps of ``request``; ``geometry`` and the ``width`` of a number in bytes stand for what
    no rehearsal showed. Nothing is kept where one forward is all.
    """
    if not request.length:
        return ()
    specs = _specs(outline, geometry, request, width=width)
    sequences = request.members * request.sequences * request.forwards
    return tuple(
        BlockCache(
            block,
            prompted=round(sequences * prompted),
            finished=round(sequences * finished),
            tensors=2 * request.members * request.forwards,
            grows=spec.keeps_all and request.cache_bits is None,
            waits=waits,
        )
        for spec in specs
        for waits in (request.cache_on_host and spec.keeps_all,)
        for encoded in (_in_steps(request.prompt, waits),)
        for prompted, finished in (_kept(spec, request, waits=waits, encoded=encoded, width=width),)
        for block in spec.blocks
    )


def _kept(spec: CacheSpec, request: Request, *, waits: bool, encoded: int, width: int) -> tuple[float, float]:
    """Return the bytes that a block keeps of a sequence of ``request`` after its prompt's forward, and in the end."""
    prompt, bits = min(request.prompt, request.length), request.cache_bits
    if bits is not None and spec.keeps_all:
        in_end = bits.finished(request.length, decoded=request.decoded, width=width)
        return bits.prompted(prompt, width=width) * spec.position_bytes, in_end * spec.position_bytes
    return (
        spec.after_prompt(_in_steps(prompt, waits), encoded=encoded),
        spec.after_token(_in_steps(request.length, waits), encoded=encoded),
    )


def _in_steps(positions: int, waits: bool) -> int:
    """Return for how many positions memory is taken, on the host where the cache ``waits``."""
    return -(-positions // KEPT_POSITIONS) * KEPT_POSITIONS if waits else positions


def cache_bytes(caches: Iterable[BlockCache], device_of: Callable[[str], DeviceId]) -> dict[DeviceId, int]:
    """Return the most bytes that ``caches`` take at once on each device, where that of a block is ``device_of`` it.

    Of those that wait on the host an accelerator has one block's as they come, and as they are used.
    """
    prompted, finished, passing = Counter[DeviceId](), Counter[DeviceId](), Counter[DeviceId]()
    for cache in caches:
        device = device_of(cache.block)
        if cache.waits and device != CPU:
            passing[device] = max(passing[device], COPIES * cache.most)
            device = CPU
        prompted[device] += cache.prompted
        finished[device] += cache.finished
    return dict((prompted | finished) + passing)


def heap_bytes(caches: Iterable[BlockCache]) -> int:
    """Return what is left unused between ``caches`` where the host computes with them; none where each is mapped."""
    small = (one for one in caches if one.grows and not one.waits and one.most < one.tensors * MAPPED_BYTES)
    return round(UNUSED_SHARE * sum(one.most for one in small))


def _specs(outline: Outline, geometry: Geometry, request: Request, *, width: int) -> tuple[CacheSpec, ...]:
    """Return what blocks keep, as a rehearsal showed it, or as the config makes it likely."""
    return request.caches or outline.skeleton.caches or (_guess(outline, geometry, width=width),)


def _guess(outline: Outline, geometry: Geometry, *, width: int) -> CacheSpec:
    """Return what a model keeps by its ``config.json``; a decoder as much of each of an encoder's positions."""
    blocks = tuple(layer.name for layer in outline.layers if layer.name in outline.blocks) or ("",)
    each = geometry.layers * geometry.cached * width / len(blocks)
    return CacheSpec(blocks, position_bytes=each, encoded_bytes=each if geometry.has_encoder else 0)
