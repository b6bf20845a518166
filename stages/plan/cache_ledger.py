"""The bytes of the cache of a request on each device: the cache of a block lies where the block computes.

What each block keeps is what a rehearsal of the model showed, whatever it keeps: keys and values of all positions or of
a window, compressed ones, a state, what an encoder gave. A model whose code refuses a rehearsal is taken to keep what
its ``config.json`` makes likely, as much in each block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from offstage.stages.empty_init.skeleton import CacheSpec
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.request.geometry import Geometry, Request
from offstage.stages.units import DeviceId


@dataclass(frozen=True, slots=True)
class BlockCache:
    """The bytes that ``block`` keeps of a request: after the prompts' forward, and in the end.

    The first may be more: a window's keys are a view of the whole prompt's until the next token comes.
    """

    block: str
    prompted: int
    finished: int


def block_caches(outline: Outline, geometry: Geometry, request: Request, *, width: int) -> tuple[BlockCache, ...]:
    """Return what each block keeps of ``request``; ``geometry`` and the ``width`` of a number in bytes stand for what
    no rehearsal showed. Nothing is kept where one forward is all.
    """
    if not request.length:
        return ()
    specs = request.caches or outline.skeleton.caches or (_guess(outline, geometry, width=width),)
    sequences = request.members * request.sequences
    prompt = min(request.prompt, request.length)
    return tuple(
        BlockCache(
            block,
            prompted=round(sequences * spec.after_prompt(prompt, encoded=request.prompt)),
            finished=round(sequences * spec.after_token(request.length, encoded=request.prompt)),
        )
        for spec in specs
        for block in spec.blocks
    )


def cache_bytes(caches: Iterable[BlockCache], device_of: Callable[[str], DeviceId]) -> dict[DeviceId, int]:
    """Return the most bytes that ``caches`` take at once on each device, where that of a block is ``device_of`` it."""
    prompted, finished = Counter[DeviceId](), Counter[DeviceId]()
    for cache in caches:
        device = device_of(cache.block)
        prompted[device] += cache.prompted
        finished[device] += cache.finished
    return dict(prompted | finished)


def _guess(outline: Outline, geometry: Geometry, *, width: int) -> CacheSpec:
    """Return what a model keeps by its ``config.json``; a decoder as much of each of an encoder's positions."""
    blocks = tuple(layer.name for layer in outline.layers if layer.name in outline.blocks) or ("",)
    each = geometry.layers * geometry.cached * width / len(blocks)
    return CacheSpec(blocks, position_bytes=each, encoded_bytes=each if geometry.has_encoder else 0)
