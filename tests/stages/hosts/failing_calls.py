"""Calls of a divided model that fail on one host alone: what the others have of them, and of all that come after.

Run on each host by ``lockstep_models``. A host that waits for what never comes hangs, and the test with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offstage
from offstage.stages.dispatch.streaming.streamer import streamer_of
from offstage.stages.hosts.stand_ins import StandIn

_BAD, _GOOD, _TOKENS = list(range(20, 27)), [[11, 12, 13], [14, 15], [16, 17, 18, 19]], 5
_LARGE = 1 << 19
"""Floats that lockstep has no copies of for each call."""


def cache_beside(folder: Path) -> Path:
    """Return the cache of all starts with checkpoints as deep as ``folder``: one host of one rehearses each model."""
    return folder.parents[1] / "cache"


def outcomes(folder: Path) -> dict[str, Any]:
    """Return what came of calls of the checkpoint ``folder``: of each that fails its error, else whether it is right.

    The last host fails at prompts of as many tokens as ``_BAD`` has, whose other hosts know nothing of that.
    """
    with offstage.load(folder, max_memory={"cpu": 10**9}, cache=cache_beside(folder)) as whole:
        wanted = [_answer(whole.model, ids) for ids in _GOOD]
    by_case: dict[str, Any] = {}
    options: dict[str, Any] = {"hosts": "auto", "concurrency": "lockstep", "batch_size": 3}
    with offstage.load(folder, max_memory={"cpu": 10**9}, cache=cache_beside(folder), **options) as loaded:
        ask = partial(_answer, loaded.model)

        def right(answers: list[torch.Tensor]) -> bool:
            return len(answers) == len(wanted) and all(map(torch.equal, answers, wanted))

        with _changing(loaded.model):
            again = loaded.generate([*_GOOD], lockstep=3, batch_size=1, max_new_tokens=_TOKENS, min_new_tokens=_TOKENS)
        by_case["begun again"] = right([torch.tensor([[*one.prompt_token_ids, *one.token_ids]]) for one in again])
        with _failing(loaded.model, lambda hidden: hidden.shape[1] == len(_BAD)):
            by_case["alone"] = _error(lambda: ask(_BAD))
            by_case["after one alone"] = right([ask(ids) for ids in _GOOD])
            by_case["in lockstep"] = _error(
                lambda: offstage.lockstep(loaded.model, [partial(ask, ids) for ids in (*_GOOD, _BAD, *_GOOD)], size=3)
            )
            by_case["after lockstep"] = right(offstage.lockstep(loaded.model, [partial(ask, ids) for ids in _GOOD]))
            submitted = [loaded.submit(ask, ids) for ids in (_BAD, *_GOOD)]
            by_case["submitted"] = _error(submitted[0].result)
            by_case["beside it"] = right([future.result() for future in submitted[1:]])
        by_case |= _cancelled(loaded, ask, right)
        by_case["kept of calls"] = _kept(loaded.model)
        by_case["in the end"] = right(offstage.lockstep(loaded.model, [partial(ask, ids) for ids in _GOOD]))
    return by_case


def _cancelled(
    loaded: offstage.LoadedModel, ask: Callable[..., torch.Tensor], right: Callable[[list[torch.Tensor]], bool]
) -> dict[str, Any]:
    """Have host 0 cancel one call that is under way and one that waits for its turn."""
    long = [loaded.submit(ask, [30, 31], tokens=200) for _ in range(4)]
    following = [loaded.submit(ask, ids) for ids in _GOOD]
    if os.environ["RANK"] == "0":
        while not long[0].running():
            time.sleep(0.001)
        assert long[0].cancel()
        assert long[3].cancel()
    errors = [_error(long[number].result) for number in (0, 3)]
    assert all(future.result().shape == (1, 202) for future in long[1:3])
    return {"cancelled": errors, "after cancelled ones": right([future.result() for future in following])}


def _kept(model: Any) -> int:
    """Return how many entries are kept of the calls of ``model`` beside the names of the last ones, none of which is
    under way: these end a moment after they have answered.
    """
    borders = streamer_of(model).passes.borders
    assert borders is not None
    inbox, until = borders.wire._inbox, time.monotonic() + 10
    values = [run._values for before, _, after in borders.runs for run in (before, after)]
    while kept := sum(map(len, (inbox._messages, inbox._missing, inbox._failed, *values))):
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    return kept


def _answer(model: Any, ids: list[int], *, tokens: int = _TOKENS) -> torch.Tensor:
    sequences: torch.Tensor = model.generate(
        torch.tensor([ids]), max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0, do_sample=False
    )
    return sequences


def _error(call: Callable[[], object]) -> str:
    """Return the kind of the error that ``call`` raises, and what it says; nothing where it raises none."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - it is told
        return f"{type(error).__name__}: {error}"
    return ""


def _own_block(model: nn.Module) -> nn.Module | None:
    """Return a block that this host computes, on the last one; null on the others."""
    if int(os.environ["RANK"]) + 1 < int(os.environ["WORLD_SIZE"]):
        return None
    blocks = model.get_submodule("model.layers").children()
    return next(block for block in blocks if not isinstance(block, StandIn))


@contextmanager
def _failing(model: nn.Module, fails: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Have a block of the last host fail at hidden states that ``fails`` says so of."""
    block = _own_block(model)

    def look(_module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if fails(given[0]):
            raise ValueError("this block is out of order")

    hook = None if block is None else block.register_forward_pre_hook(look)
    yield
    if hook is not None:
        hook.remove()


@contextmanager
def _changing(model: nn.Module) -> Iterator[None]:
    """Have a block of the last host change something in place that each call in lockstep would need a copy of."""
    block = _own_block(model)
    if block is None:
        yield
        return
    block.register_buffer("seen", torch.zeros(_LARGE), persistent=False)

    def change(module: nn.Module, _given: object) -> None:
        module.get_buffer("seen").add_(1)

    hook = block.register_forward_pre_hook(change)
    yield
    hook.remove()
    del block.seen
