"""Measuring how fast the host decodes with weights that lie in its memory: small decoders, a token at a time.

A token multiplies one row by each weight, one after the other. Beside its products each module takes the time of its
call and of what it computes with the row alone, with what caches hold of that after so many weights. The layers of a
decoder of some hundred million parameters tell it, less what products with such weights take. What a token takes around
the layers, what a model does once for it and what chooses it, is the rest.

It is in the dtype that is asked for, in a process of its own: what it takes of memory is no part of a run's peak.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from statistics import median
from typing import Any

from offstage.stages.machine.product_probe import (
    OF_FILES,
    HostWeights,
    are_steady,
    memory_bytes,
    seconds_with,
    typical,
)
from offstage.stages.units import DTYPE_BYTES

_log = logging.getLogger("offstage")

_LAYERS, _WORDS = 2, 32000
_SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
_LAYER_NUMBERS = 4 * 1024 * 1024 + 3 * 1024 * 2816
_NARROW = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
_ROUNDS, _TOKENS = 24, 5
_MOST_SECONDS, _NARROW_SECONDS = 4.0, 0.5


def question(weights: HostWeights) -> tuple[str, ...]:
    """Return what a process of its own is asked for a decoder of such ``weights``; it answers as ``measure``."""
    return "machine.decoding_probe", weights.dtype, str(weights.offset)


def measure(dtype: str, offset: str, layers: str = "0", rounds: int = _ROUNDS) -> dict[str, int]:
    """Return the bytes that products of the ``host`` read in a second, how many ``calls`` it makes, and ``loops``.

    Calls are of modules that hold weights, for all that these take beside reading; loops are those around tokens, for
    all that one takes beside its calls. The decoder has so many ``layers``, or as many as no cache holds: its weights
    are of ``dtype``, and begin so many bytes after a cache line's beginning.
    """
    count = int(layers) or ceil(memory_bytes() / _LAYER_NUMBERS / DTYPE_BYTES[dtype])
    return _decode(_Spans(_decoder(_SHAPE, _WORDS, count, dtype=dtype, offset=int(offset))), rounds, _MOST_SECONDS)


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


def narrow_speed(at: int, layers: int = _LAYERS, rounds: int = _ROUNDS) -> dict[str, int]:
    """Return how many ``calls`` and ``loops`` a narrow decoder makes in a second, its products a part of calls.

    What little these read is apart, ``at`` so many bytes a second, as a light model's is. It has few words too, as a
    light model has, whose loops are the quicker.
    """
    from offstage.stages.machine.operator_threads import alone

    _log.info("measures how fast the host calls modules, once for this processor and torch: a moment")
    narrow = _Spans(_decoder(_NARROW, _NARROW["hidden_size"], layers), at=at)
    with alone():  # so small products gain nothing of a team, which waits for whom others keep from a core
        speeds = _decode(narrow, rounds, _NARROW_SECONDS)
    return {name: speeds[name] for name in ("calls", "loops")}


def _decode(spans: _Spans, rounds: int, seconds: float) -> dict[str, int]:
    """Return the figures of a decoder that decodes so many ``rounds``, or for so many ``seconds`` if that is less; and
    fewer where these are steady.

    What calls take beside products is told by round, in which both are as fast as the machine is then.
    """
    begun, taken = time.perf_counter(), list[_Round]()
    while len(taken) < rounds and (time.perf_counter() - begun < seconds or not taken):
        taken.append(spans.decode())
        if all(are_steady([getattr(one, figure) for one in taken]) for figure in ("call", "around", "host")):
            break
    call, around = median(one.call for one in taken), median(one.around for one in taken)
    return {
        "host": round(median(one.host for one in taken)),
        "calls": round(1 / call),
        "loops": round(1 / max(call, around)),
    }


def _decoder(
    shape: Mapping[str, int], words: int, layers: int, *, dtype: str = "bfloat16", offset: int = OF_FILES.offset
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
class _Round:
    """What some tokens took: seconds of each ``call`` in a decoder's layers beside products, and ``around`` the layers
    beside calls and products; and the bytes a second that products of the ``host`` read, one after the other.
    """

    call: float
    around: float
    host: float


class _Spans:
    """The spans of time of a decoder's forwards, from one call of a module with weights to its end, and on to the next.

    What goes on from one forward to the next is a span too. Products are apart from them: all that they take, or what
    they take to read their weights ``at`` so many bytes a second.
    """

    def __init__(self, model: Any, *, at: int | None = None) -> None:
        import torch

        self._model, self._prompt, self._at = model, torch.ones(1, 1, dtype=torch.long), at
        self._last, self._spans, self._forwards = 0.0, [0.0, 0.0], list[list[float]]()
        self._inner = [module for module in model.model.layers.modules() if module._parameters]
        self._outer = [model.model.embed_tokens, model.model.norm, model.lm_head]
        for module in (*self._inner, *self._outer):
            inside = module in self._inner
            module.register_forward_pre_hook(partial(self._end, inside and module is not self._inner[0]))
            module.register_forward_hook(partial(self._end, inside))
        model.lm_head.register_forward_hook(self._begin)

    def decode(self) -> _Round:
        """Return what some tokens take now, the first aside."""
        self._forwards.clear()
        self._model.generate(
            self._prompt, do_sample=False, min_new_tokens=_TOKENS, max_new_tokens=_TOKENS, pad_token_id=0
        )
        outside, inside = map(typical, zip(*self._forwards[1:], strict=True))
        layers, head = (self._products(called) for called in (self._inner, self._outer))
        read = sum(module.weight.nbytes for module in (*self._inner, *self._outer) if _multiplies(module))
        call = max(inside - layers, inside / 10) / len(self._inner)
        return _Round(call, outside - head - len(self._outer) * call, read / (layers + head))

    def _products(self, called: Sequence[Any]) -> float:
        """Return how long products with the weights of the modules ``called`` take, one after the other."""
        weights = [module.weight for module in called if _multiplies(module)]
        return sum(weight.nbytes / self._at if self._at else seconds_with(weight) for weight in weights)

    def _begin(self, *_: object) -> None:
        """Begin with a forward, which goes on from the last one."""
        self._forwards.append(self._spans)
        self._spans = [0.0, 0.0]

    def _end(self, inside: bool, *_: object) -> None:
        now = time.perf_counter()
        self._spans[inside] += now - self._last
        self._last = time.perf_counter()


def _multiplies(module: Any) -> bool:
    """Return whether ``module`` multiplies by its weight: a table is looked up, and a norm's is one of factors."""
    import torch

    return isinstance(module, torch.nn.Linear)
