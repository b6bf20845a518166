"""Measuring how fast the host decodes with weights that lie in its memory: a small decoder, a token at a time.

A token multiplies one row by each weight, one after the other, and no cache holds them until the next token; beside the
products each module takes the time of its call and of what it computes with the row alone. Both are measured on layers
as wide as those of a model of a billion parameters, in bfloat16, in a process of its own: what it takes of memory is no
part of a run's peak.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from typing import Any

from offstage.stages.machine.own_process import measure_apart

_log = logging.getLogger("offstage")

_LAYERS = 3
_WIDE = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4}
_NARROW = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
_NARROW_SECONDS = 0.5
BYTES = 320 * 2**20
"""What the decoder's weights take, at most."""
_ROUNDS, _MOST_SECONDS = 40, 8.0
_DISTURBED = 1.125
"""By how much a span is longer than the least of its kind only where something else had the processor."""


def decoding_speed() -> dict[str, int] | None:
    """Return the bytes of weights that products of the ``host`` read in a second, and how many ``calls`` it makes.

    These are of modules that hold weights, for all that is computed beside products. Null where memory is too short for
    a second process, or where that fails.
    """
    _log.info("measures how fast the host decodes, once for this processor and torch: a few seconds")
    found: dict[str, int] | None = measure_apart("decoding_probe", beside=BYTES)
    return found


def measure(layers: int = _LAYERS, rounds: int = _ROUNDS, **wide: int) -> dict[str, int]:
    """Return the figures of a decoder of so many ``layers``, ``wide`` as the arguments of its config say.

    Each of its parts counts as fast as it is undisturbed: what else the machine does only ever makes one slower.
    """
    import torch
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(**{**_WIDE, **wide}, num_hidden_layers=layers, vocab_size=8)
    with torch.device("meta"):
        model = LlamaModel._from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu").eval()
    with torch.inference_mode():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(0.01)  # the system has one page for all memory that was never written to
        return _measure(model, torch.ones(1, 1, dtype=torch.long), rounds)


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


def narrow_speed(layers: int = 2, tokens: int = 8, rounds: int = 24) -> int:
    """Return how many modules that hold weights the host calls in a second of decoding with a narrow model.

    All that a token takes is in it, choosing it too: of so few layers that this weighs as it does for a light model
    that streams. What else the machine does counts as little as in ``measure``.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from offstage.stages.machine.operator_threads import alone

    _log.info("measures how fast the host calls modules, once for this processor and torch: a moment")
    config = LlamaConfig(**_NARROW, num_hidden_layers=layers, vocab_size=_NARROW["hidden_size"])
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu").eval()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(0.01)  # nothing is drawn: a caller's own draws go on as if this hadn't been
    spans = _Spans(between=True)
    holders = spans.watch_all(model, first=model)
    prompt, begun = torch.ones(1, 1, dtype=torch.long), time.perf_counter()
    with alone():  # so small products gain nothing of a team, which waits for whom others keep from a core
        for _ in range(rounds):
            spans.rest()
            model.generate(prompt, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0)
            if time.perf_counter() - begun > _NARROW_SECONDS:
                break
    return round(len(holders) / sum(spans.total(products=which) for which in (True, False)))


def _measure(model: Any, token: Any, rounds: int) -> dict[str, int]:
    spans = _Spans()
    holders = spans.watch_all(model.layers, first=model.layers[0])
    begun = time.perf_counter()
    for _ in range(rounds):
        _, cache = model(token, use_cache=True).to_tuple()
        model(token, None, None, cache, use_cache=True)  # whose name isn't the same in each release of transformers
        if time.perf_counter() - begun > _MOST_SECONDS:
            break
    read = sum(module.weight.nbytes for module in holders)
    multiplying, beside = (spans.total(products=which) for which in (True, False))
    return {"host": round(read / multiplying), "calls": round(len(holders) / beside)}


class _Spans:
    """A forward's spans of time from one call of a module that is watched to its end, and on to the next.

    Of each span such a time counts as only a tenth of the forwards were faster in, since the very least of each never
    come together; but hardly more than the least. What else the machine does makes spans longer, and none shorter.
    What goes on ``between`` two forwards, until ``rest``, is a span too where that is wanted.
    """

    def __init__(self, *, between: bool = False) -> None:
        self._between, self._last, self._number = between, 0.0, 0
        self._taken: dict[tuple[bool, int], list[float]] = defaultdict(list)

    def watch_all(self, module: Any, *, first: Any) -> list[Any]:
        """Have spans begin and end with what holds weights in ``module``, and return that; forwards with ``first``."""
        first.register_forward_pre_hook(lambda *_: self._begin())
        holders = [inner for inner in module.modules() if inner._parameters]
        for inner in holders:
            self._watch(inner, multiplies=inner.weight.ndim > 1)
        return holders

    def rest(self) -> None:
        """Let what goes on from now on be no span."""
        self._last = 0.0

    def total(self, *, products: bool) -> float:
        """Return the seconds of all spans that are ``products``, or that aren't."""
        found = (sorted(taken) for (product, _), taken in self._taken.items() if product == products)
        return sum(min(taken[len(taken) // 10], _DISTURBED * taken[0]) for taken in found)

    def _begin(self) -> None:
        """Begin with the first span of a forward."""
        if self._between and self._last:
            self._end(product=False)
        self._last, self._number = time.perf_counter(), 0

    def _watch(self, module: Any, *, multiplies: bool) -> None:
        """Have a span begin and end as ``module`` does; ``multiplies`` says whether it is a product."""
        module.register_forward_pre_hook(lambda *_: self._end(product=False))
        module.register_forward_hook(lambda *_: self._end(product=multiplies))

    def _end(self, *, product: bool) -> None:
        self._taken[product, self._number].append(time.perf_counter() - self._last)
        self._number += 1
        self._last = time.perf_counter()
