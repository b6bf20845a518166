"""One rehearsal of each model in a process of tests, however many of them begin with it in an empty cache."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from offstage.stages.empty_init.fake_weights import Faking
from offstage.stages.empty_init.skeleton import Skeleton

_skeletons: dict[Hashable, Skeleton] = {}
"""What this process has found of each model that it rehearsed, by all that a rehearsal sees of one."""
_MOST_KEPT = 20_000
"""So many operators of fake tensors are kept, each with what it was given and what it makes: some tens of megabytes."""
_NOT_SEEN = ("_name_or_path", "quantization_config")
"""What a config says of where it was read, and of how weights rest."""


@contextmanager
def rehearsing_once() -> Iterator[None]:
    """Have what was found of a model serve the next one that a rehearsal can't tell from it.

    That is most of what a run of a small model takes. The model is made anew, and all else of its skeleton is too.
    """
    describing = import_module("offstage.stages.empty_init.describe")
    rehearse = describing.describe

    def describe_once(model: Any, **how: Any) -> Skeleton:
        seen = _seen(model, how)
        if seen is None:
            return rehearse(model, **how)
        if seen not in _skeletons:
            _skeletons[seen] = rehearse(model, **how)
        return _skeletons[seen]

    with keeping_operators(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(describing, "describe", describe_once)
        yield


@contextmanager
def keeping_operators() -> Iterator[None]:
    """Have what torch found that an operator makes of fake tensors serve other models: tests' have the same shapes."""
    clear = Faking.cache_clear

    def clear_where_full() -> None:
        if len(Faking.cache) > _MOST_KEPT:
            clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Faking, "cache_clear", clear_where_full)
        yield


@pytest.fixture(autouse=True, scope="module")
def rehearses_once() -> Iterator[None]:
    """``rehearsing_once`` for the tests of each folder whose conftest has this."""
    with rehearsing_once():
        yield


def _seen(model: Any, how: Mapping[str, Any]) -> Hashable | None:
    """Return what a rehearsal sees of ``model``: the very classes, what they were made of, tensors; null for a module
    of one's own, whose attributes nobody knows.
    """
    if not isinstance(model, PreTrainedModel) or type(model).__module__.startswith("peft"):
        return None
    given = {key: value for key, value in model.config.to_dict().items() if key not in _NOT_SEEN}
    return (
        tuple((name, type(module)) for name, module in model.named_modules(remove_duplicate=False)),
        tuple((name, each.shape, each.dtype, each.device) for name, each in model.state_dict(keep_vars=True).items()),
        tuple((name, each.shape, each.dtype) for name, each in model.named_buffers()),
        repr(given), str(model.config._attn_implementation), repr(how), torch.get_default_dtype(),
    )  # fmt: skip
