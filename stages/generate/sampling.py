"""Sampling that doesn't depend on the batch: each prompt draws from a generator of its own.

A batch is sampled with one call, from one stream of random numbers: which of them a prompt gets depends on the prompts
beside it. Here that call is answered prompt by prompt instead. A prompt alone draws what transformers' own ``generate``
draws after ``torch.manual_seed``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class SeededRows(TorchFunctionMode):
    """While entered, ``torch.multinomial`` draws the rows of each prompt from a generator with its seed of ``seeds``.

    The rows of a prompt stand together, as many for each: its copies, or its beams.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        super().__init__()
        self._seeds = seeds
        self._generators: list[torch.Generator] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.multinomial or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        weights = args[0] if args else kwargs.pop("input")
        if not self._generators:
            self._generators = [torch.Generator(weights.device).manual_seed(seed) for seed in self._seeds]
        rows = weights.reshape(len(self._seeds), -1, weights.shape[-1])
        drawn = [
            func(own, *args[1:], **kwargs, generator=generator)
            for own, generator in zip(rows, self._generators, strict=True)
        ]
        return torch.cat(drawn).reshape(*weights.shape[:-1], -1)
