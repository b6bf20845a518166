"""Sampling that doesn't depend on the batch: each prompt draws from a generator of its own.

A batch is sampled with one call, from one stream of random numbers: which of them a prompt gets depends on the prompts
beside it. Here that call is answered prompt by prompt instead. A prompt alone draws what transformers' own ``generate``
draws after ``torch.manual_seed``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.hooks import RemovableHandle


class _Rows:
    """The generators of a batch's prompts, one for each of ``seeds``, made where the first draw is."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._seeds = seeds
        self._generators: list[torch.Generator] = []

    def generators(self, device: torch.device) -> list[torch.Generator]:
        """Return them, on ``device``."""
        if not self._generators:
            self._generators = [torch.Generator(device).manual_seed(seed) for seed in self._seeds]
        return self._generators

    def copied(self) -> _Rows:
        """Return others that will draw the same."""
        rows = _Rows(self._seeds)
        rows._generators = [generator.clone_state() for generator in self._generators]
        return rows


_rows: ContextVar[_Rows | None] = ContextVar("rows", default=None)
"""Those of the batch that is answered now: each of several in lockstep has a context of its own."""
_left: ContextVar[SeededRows | None] = ContextVar("left", default=None)
"""Which one was left for a forward that is under way."""


@contextmanager
def seeded_rows(seeds: Sequence[int]) -> Iterator[None]:
    """Have what is drawn inside, under ``SeededRows``, be drawn for prompts with these ``seeds``."""
    token = _rows.set(_Rows(seeds))
    try:
        yield
    finally:
        _rows.reset(token)


@contextmanager
def foreseen_draws() -> Iterator[None]:
    """Have what is drawn inside be what will be drawn after it, from like distributions like tokens."""
    rows = _rows.get()
    token = _rows.set(rows.copied() if rows is not None else None)
    try:
        yield
    finally:
        _rows.reset(token)


class SeededRows(TorchFunctionMode):
    """While entered, ``torch.multinomial`` draws the rows of each prompt from a generator with its seed.

    The rows of a prompt stand together, as many for each: its copies, or its beams. Without ``seeded_rows`` it draws as
    torch does. While the ``model`` computes it is left: it would answer each operator there, of which none draws.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model, self._hooks = model, list[RemovableHandle]()

    def __enter__(self) -> Self:
        self._hooks = [
            self._model.register_forward_pre_hook(self._leave),
            self._model.register_forward_hook(self._come_back, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._is_innermost():  # an interrupt in a forward has no hook called after it
            super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def _is_innermost(self) -> bool:
        return _get_current_function_mode_stack()[-1:] == [self]  # type: ignore[no-untyped-call, no-any-return]

    def _leave(self, *_: object) -> None:
        if self._is_innermost():
            _left.set(self)
            _pop_mode()  # type: ignore[no-untyped-call]

    def _come_back(self, *_: object) -> None:
        if _left.get() is self:
            _left.set(None)
            _push_mode(self)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, rows = kwargs or {}, _rows.get()
        if func is not torch.multinomial or rows is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        weights = args[0] if args else kwargs.pop("input")
        generators = rows.generators(weights.device)
        drawn = [
            func(own, *args[1:], **kwargs, generator=generator)
            for own, generator in zip(weights.reshape(len(generators), -1, weights.shape[-1]), generators, strict=True)
        ]
        return torch.cat(drawn).reshape(*weights.shape[:-1], -1)
