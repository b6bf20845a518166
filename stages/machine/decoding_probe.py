"""Measuring how fast the host decodes with weights that lie in its memory: small decoders, a token at a time.

A token multiplies one row by each weight, one after the other, and no cache holds them until the next token. Beside
bytes that are read each module takes the time of its call and of what it computes with the row alone; so does a product
too, however narrow. Two decoders tell both: one has next to no bytes, and one is as wide as those of a billion
parameters. What a token takes around the layers, what a model does once for it and what chooses it, is the rest.

All are in the dtype that is asked for, in a process of their own: what it takes of memory is no part of a run's peak.
Weights begin where those of most safetensors files do, at a multiple of eight bytes and no larger one: from there
products read them up to a fifth slower than from a cache line's beginning, where dequantised ones begin.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from offstage.stages.machine.own_process import measure_apart
from offstage.stages.units import DTYPE_BYTES

_log = logging.getLogger("offstage")

_LAYERS, _WORDS = 2, 32000
_WIDE = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4}
_NARROW = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
BYTES = 320 * 2**20
"""What the decoders' weights take in two bytes each, at most."""
_OFFSET = 8
_ROUNDS, _TOKENS = 24, 8
_MOST_SECONDS, _NARROW_SECONDS = 4.0, 0.5
_DISTURBED = 1.125
"""By how much a span is longer than the least of its kind only where something else had the processor."""


@dataclass(frozen=True, slots=True)
class HostWeights:
    """The weights that a host's products read: their ``dtype``, and whether they are ``aligned``, as dequantised ones
    are.
    """

    dtype: str = "bfloat16"
    aligned: bool = False

    @property
    def offset(self) -> int:
        """How far after a cache line's beginning they begin, in bytes."""
        return 0 if self.aligned else _OFFSET

    @property
    def name(self) -> str:
        """What figures of them are kept under."""
        return f"{self.dtype}{', aligned' if self.aligned else ''}"


OF_FILES = HostWeights()
"""Those of most safetensors files."""


def decoding_speed(weights: HostWeights = OF_FILES) -> dict[str, int] | None:
    """Return the bytes of weights that products of the ``host`` read in a second, how many ``calls`` it makes, and how
    many ``loops``.

    Calls are of modules that hold weights, for all that these take beside reading; loops are those around tokens, for
    all that one takes beside its calls. Null where memory is too short for a second process, or where that fails.
    """
    _log.info("measures how fast the host decodes, once for this processor and torch: a few seconds")
    asked, beside = [weights.dtype, str(weights.offset)], round(BYTES * DTYPE_BYTES[weights.dtype] / 2)
    speed: dict[str, int] | None = measure_apart("machine.decoding_probe", *asked, beside=beside)
    return speed


def measure(dtype: str, offset: str, layers: int = _LAYERS, rounds: int = _ROUNDS) -> dict[str, int]:
    """Return the figures of two decoders of so many ``layers``, which decode by turns: their weights are of ``dtype``,
    and begin so many bytes after a cache line's beginning.
    """
    narrow, wide = (
        _Spans(_decoder(shape, _WORDS, layers, dtype=dtype, offset=int(offset))) for shape in (_NARROW, _WIDE)
    )
    _decode([narrow, wide], rounds, seconds=_MOST_SECONDS)
    few, many = narrow.layers, wide.layers
    host = (many.reads - few.reads) / max(many.seconds - few.seconds, many.seconds / 2)
    call = (few.seconds - min(few.reads / host, few.seconds / 2)) / few.calls
    return {"host": round(host), "calls": round(1 / call), "loops": wide.loops(call, host)}


def launch_speed(device: str, layers: int = 8, tokens: int = 8, rounds: int = 12) -> int:
    """Return how many modules that hold weights a decoder calls in a second on ``device``, which has little to do then.

    That is what the host takes to have an accelerator compute, choosing each token too, which is waited for. A quarter
    of the rounds were faster.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_NARROW, num_hidden_layers=layers, vocab_size=_NARROW["hidden_size"])
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).to(device).eval()
    calls = sum(1 for module in model.modules() if module._parameters)
    prompt, taken = torch.ones(1, 1, dtype=torch.long, device=device), list[float]()
    for _ in range(rounds):
        begun = time.perf_counter()
        model.generate(prompt, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0)
        taken.append(time.perf_counter() - begun)
    return round(calls * tokens / sorted(taken)[rounds // 4])


def narrow_speed(layers: int = _LAYERS, rounds: int = _ROUNDS) -> dict[str, int]:
    """Return how many ``calls`` and ``loops`` a narrow decoder makes in a second, with what little it reads.

    It has few words too, as a light model has, whose loops are the quicker.
    """
    from offstage.stages.machine.operator_threads import alone

    _log.info("measures how fast the host calls modules, once for this processor and torch: a moment")
    narrow = _Spans(_decoder(_NARROW, _NARROW["hidden_size"], layers))
    with alone():  # so small products gain nothing of a team, which waits for whom others keep from a core
        _decode([narrow], rounds, seconds=_NARROW_SECONDS)
    call = narrow.layers.seconds / narrow.layers.calls
    return {"calls": round(1 / call), "loops": narrow.loops(call)}


def _decode(decoders: Sequence[_Spans], rounds: int, *, seconds: float) -> None:
    """Have ``decoders`` decode by turns, so many ``rounds``, or for so many ``seconds`` if that is less."""
    begun = time.perf_counter()
    for _ in range(rounds):
        for decoder in decoders:
            decoder.decode()
        if time.perf_counter() - begun > seconds:
            break


def _decoder(
    shape: Mapping[str, int], words: int, layers: int, *, dtype: str = "bfloat16", offset: int = _OFFSET
) -> Any:
    """Return a decoder of that ``shape``, its weights so many bytes after a cache line's beginning."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from offstage.stages.machine.aligned_memory import room_for

    config = LlamaConfig(**shape, vocab_size=words, num_hidden_layers=layers, tie_word_embeddings=True)
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype))
    model = model.to_empty(device="cpu").eval()
    model.tie_weights()
    for parameter in model.parameters():
        parameter.data = room_for(tuple(parameter.shape), parameter.dtype, offset=offset).tensor
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(0.01)  # nothing is drawn; and the system has one page for all memory never written to
    return model


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a forward: so many ``calls`` of modules that hold weights, which read so much; ``seconds`` in all."""

    calls: int
    reads: int
    seconds: float


class _Spans:
    """The spans of time of a decoder's forwards, from one call of a module with weights to its end, and on to the next.

    Each counts as long as half of the forwards took for it, but hardly more than the least: what else the machine does
    makes spans longer, and none shorter. What goes on from one forward to the next is a span too.
    """

    def __init__(self, model: Any) -> None:
        import torch

        self._model, self._prompt = model, torch.ones(1, 1, dtype=torch.long)
        self._last, self._number = 0.0, 0
        self._taken: dict[tuple[bool, int], list[float]] = defaultdict(list)
        self._inner = [module for module in model.model.layers.modules() if module._parameters]
        self._outer = [model.model.embed_tokens, model.model.norm, model.lm_head]
        for module in (*self._inner, *self._outer):
            inside = module in self._inner
            module.register_forward_pre_hook(partial(self._end, inside and module is not self._inner[0]))
            module.register_forward_hook(partial(self._end, inside))
        model.lm_head.register_forward_hook(self._begin)

    def decode(self) -> None:
        """Decode some tokens, after whatever went on meanwhile."""
        self._last = 0.0
        self._model.generate(
            self._prompt, do_sample=False, min_new_tokens=_TOKENS, max_new_tokens=_TOKENS, pad_token_id=0
        )

    @property
    def layers(self) -> _Part:
        """What the layers of a forward take."""
        return self._part(self._inner, self._inner, inside=True)

    def loops(self, call: float, host: float = math.inf) -> int:
        """Return how often in a second goes on what is around a forward's layers, where each ``call`` takes so long and
        ``host`` is how fast it reads: beside both.
        """
        around = self._part(self._outer, self._outer[-1:], inside=False)
        return round(1 / max(call, around.seconds - around.calls * call - around.reads / host))

    def _part(self, called: Sequence[Any], read: Sequence[Any], *, inside: bool) -> _Part:
        timings = (taken for (where, _), taken in self._taken.items() if where == inside)
        spans = (min(median(taken), _DISTURBED * min(taken)) for taken in timings)
        return _Part(len(called), sum(module.weight.nbytes for module in read), sum(spans))

    def _begin(self, *_: object) -> None:
        """Begin with the first span of a forward, which goes on from the last one."""
        self._number = 0

    def _end(self, inside: bool, *_: object) -> None:
        if self._last:
            self._taken[inside, self._number].append(time.perf_counter() - self._last)
        self._number += 1
        self._last = time.perf_counter()
