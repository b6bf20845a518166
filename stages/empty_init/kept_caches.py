"""What a forward leaves for the next one, by the block that made it: keys and values, states, what an encoder gave.

All that is alive when a forward is over and its output gone is kept for the next one, whatever a model calls it and
wherever its code puts it: in a cache that it returns, in one that it was given, or in its own modules. So storages are
counted, each under the block that was running when it was made.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from offstage.stages.calls.results import CACHES
from offstage.stages.empty_init.live_storages import LiveStorages
from offstage.stages.empty_init.module_usage import watch_calls
from offstage.stages.empty_init.skeleton import CacheSpec


@dataclass(frozen=True, slots=True)
class Leftover:
    """What one forward leaves, in bytes by block: of the decoder's ``own`` positions, and of ``crossed`` attention.

    ``windows`` are how many positions a later forward keeps, of those blocks that don't keep all. An encoder made
    ``encoded`` positions, 0 where there is none.
    """

    own: Mapping[str, int]
    crossed: Mapping[str, int]
    windows: Mapping[str, int]
    encoded: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(self.own.values()) + sum(self.crossed.values())


class Probe(NamedTuple):
    """What a forward of so many ``sequences`` with so many ``positions`` each left."""

    sequences: int
    positions: int
    left: Leftover


class StoragesByBlock(LiveStorages):
    """Storages that are alive, and the block that each was made in: the outermost of those running, or none."""

    def __init__(self) -> None:
        super().__init__()
        self._running: list[str] = []
        self._made_in: dict[int, str] = {}

    def watching(self, model: nn.Module, blocks: Collection[str]) -> AbstractContextManager[None]:
        """Know which block of ``model`` runs; ``blocks`` names their classes."""
        watched = [(name, module) for name, module in model.named_modules() if type(module).__name__ in blocks]
        return watch_calls(watched, lambda name, _: self._running.append(name), lambda _: self._running.pop())

    def meet(self, tensor: torch.Tensor, *, counts: bool = True) -> None:
        """Count the storage of ``tensor`` from now to its death, if it is new; or never."""
        key = tensor.untyped_storage()._cdata
        if key not in self._bytes:
            self._made_in[key] = self._running[0] if self._running else ""
        super().meet(tensor, counts=counts)

    def leftover(self, caches: Iterable[Any], *, encoded: int) -> Leftover:
        """Return what is alive, some of it in ``caches``; an encoder made so many positions."""
        windows: dict[str, int] = {}
        crossing: set[int] = set()
        for layer, crosses in _layers(caches):
            keys = [one.untyped_storage()._cdata for one in vars(layer).values() if isinstance(one, torch.Tensor)]
            window = getattr(layer, "sliding_window", None)
            crossing.update(keys if crosses else ())
            windows |= {self._made_in[key]: window for key in keys if window and self._bytes.get(key)}
        own, crossed = Counter[str](), Counter[str]()
        for key, size in self._bytes.items():
            if size:
                (crossed if key in crossing else own)[self._made_in[key]] += size
        return Leftover(own, crossed, windows, encoded)


def _layers(caches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield the layers of ``caches`` in transformers' terms, and whether each keeps what an encoder made."""
    for cache in caches:
        for part in (getattr(cache, "self_attention_cache", cache), getattr(cache, "cross_attention_cache", None)):
            crosses = part is not cache and part is getattr(cache, "cross_attention_cache", None)
            yield from ((layer, crosses) for layer in getattr(part, "layers", ()))


def encoded_positions(output: Any) -> int:
    """Return how many positions of a sequence an encoder made, by what a forward returned; 0 where there is none."""
    states = getattr(output, "encoder_last_hidden_state", None)
    return 0 if states is None else int(states.shape[1])


def new_cache(model: nn.Module) -> dict[str, Any]:
    """Return an empty cache for ``model`` by its argument's name, as ``generate`` makes it; nothing where the model
    makes its own.
    """
    config: Any = getattr(model, "config", None)
    is_given_one = getattr(model, "_supports_default_dynamic_cache", lambda: False)()
    generates = hasattr(config, "get_text_config") and getattr(model, "can_generate", lambda: False)()
    if not generates or not is_given_one or getattr(config, "is_encoder_decoder", False):
        return {}
    from transformers import DynamicCache

    taken = [name for name in inspect.signature(model.forward).parameters if name in CACHES]
    return {name: DynamicCache(config=config.get_text_config(decoder=True)) for name in taken[:1]}


def cache_specs(probes: Sequence[Probe], stands_for: Mapping[str, str]) -> tuple[CacheSpec, ...]:
    """Return what all blocks keep, by kind, as one or more ``probes`` of as many sequences showed it.

    ``stands_for`` has the block that did for each that wasn't run. Beside an encoder all of a decoder's own is taken to
    grow with its positions, and so where there is one probe alone.
    """
    blocks_of: dict[CacheSpec, list[str]] = {}
    run = {**probes[0].left.own, **probes[0].left.crossed}
    blocks = [*run, *(name for name, other in stands_for.items() if other in run and name not in run)]
    for block in blocks:
        blocks_of.setdefault(_spec(probes, stands_for.get(block, block)), []).append(block)
    return tuple(replace(spec, blocks=tuple(blocks)) for spec, blocks in blocks_of.items())


def _spec(probes: Sequence[Probe], block: str) -> CacheSpec:
    sequences, positions, left = probes[0]
    own = [probe.left.own.get(block, 0) / probe.sequences for probe in probes]
    spec = CacheSpec((), window=left.windows.get(block))
    if left.encoded or len(probes) == 1:
        crossed = left.crossed.get(block, 0) / (sequences * max(1, left.encoded))
        return replace(spec, position_bytes=own[0] / positions, encoded_bytes=crossed)
    slope = (own[1] - own[0]) / (probes[1].positions - positions)
    return replace(spec, state_bytes=own[0] - slope * positions, position_bytes=slope)
