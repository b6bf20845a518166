"""Fake tensors in place of a model's weights: its code runs, and nothing is computed or allocated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from offstage.pipeline.command_exit import interrupts_that_last
from offstage.pipeline.errors import OffstageError
from offstage.stages.empty_init.deciding import decide, is_decided, with_indices

Found = TypeVar("Found")

REFUSALS = (
    RuntimeError, TypeError, ValueError, AttributeError, LookupError, ImportError, AssertionError,
)  # fmt: skip
"""What a model's code may raise when it meets fake tensors: a rehearsal that fails is no error, only less is known."""


class Faking(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors for a whole model.

    A subclass that watches operators does so in this one mode: intercepted once and not twice, they take half the time.
    It hears of those of the model's code alone: torch takes an operator apart only the first time that it meets it.
    One that ``decides`` runs code too that asks for values: see ``deciding``.
    """

    def __init__(self, *, decides: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._decides = decides
        self._interrupts: list[AbstractContextManager[None]] = []
        self._depth = 0

    def __enter__(self) -> Self:
        self._interrupts.append(interrupts_that_last())
        self._interrupts[-1].__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        try:
            super().__exit__(*raised)
        finally:
            self._interrupts.pop().__exit__(*raised)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and guarding against it would cost each operator a detour

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._depth += 1
        try:
            result = self.operate(func, types, args, kwargs)
        finally:
            self._depth -= 1
        if not self._depth:
            self.operated(func, args, kwargs, result)
        return result

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Have nothing be heard of operators."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def operated(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Hear that the model's code had ``func`` make ``result``."""

    def operate(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return what ``func`` makes of fake tensors."""
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _fake_grouped_mm(*args, **kwargs)
        if not self._decides:
            return self.dispatch(func, types, args, kwargs)
        if is_decided((args, kwargs)):
            return func(*args, **kwargs)
        self._decides = False  # inside an operator, fake tensors are what they always are
        try:
            args = with_indices(func, args)
            faked = self.dispatch(func, types, args, kwargs)
        finally:
            self._decides = True
        return decide(func, args, kwargs, faked)


def _fake_grouped_mm(left: torch.Tensor, right: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the grouped product of a mixture's experts: torch knows the shape of no other dtype's than bfloat16."""
    if (left.dim(), right.dim()) == (2, 3):
        return left.new_empty((left.shape[0], right.shape[2]))
    product = torch.ops.aten._grouped_mm.default(left.bfloat16(), right.bfloat16(), *args, **kwargs)
    return product.to(left.dtype)  # type: ignore[no-any-return]


class RefusedError(RuntimeError):
    """A model's code refused fake tensors; it says how."""


def answered(run: Callable[[bool], Found]) -> Found:
    """Return what ``run`` returns of a model whose code meets fake tensors; it is told whether to decide what data do.

    At first it isn't to (see ``deciding``), and is where code refuses that. A ``RefusedError`` has the first refusal
    where both are. An error of ours is none: it is of a call that can't be made, with fake tensors or real ones.
    """
    refusals = []
    for decides in (False, True):
        try:
            return run(decides)
        except OffstageError:
            raise
        except REFUSALS as error:
            first_line = (str(error).strip() or "no message").splitlines()[0]
            refusals.append(f"{type(error).__name__}: {first_line}")
    raise RefusedError(refusals[0])


def fake_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a fake cpu tensor for every parameter name; tied names share one. To be called in the mode."""
    fakes: dict[int, torch.Tensor] = {}
    weights = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in fakes:
            fakes[id(parameter)] = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        weights[name] = fakes[id(parameter)]
    return weights


@contextmanager
def swapped(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Bind ``weights`` in place of the model's parameters; all is as it was afterwards, whatever happened.

    So is what the model's own code notes on its modules (that it has rescaled its layers, say), and the hooks that it
    puts there (transformers' for hidden states, which it would put there twice): nothing was computed.
    """
    homes = [(model.get_submodule(name.rpartition(".")[0])._parameters, name) for name in weights]
    saved = [table[name.rpartition(".")[2]] for table, name in homes]
    notes = [(table, dict(table)) for module in model.modules() for table in _tables(module)]
    try:
        for table, name in homes:
            table[name.rpartition(".")[2]] = weights[name]  # type: ignore[assignment]
        yield
    finally:
        for (table, name), parameter in zip(homes, saved, strict=True):
            table[name.rpartition(".")[2]] = parameter
        for noted, before in notes:
            for name in noted.keys() - before.keys():
                del noted[name]
            noted.update(before)


def _tables(module: nn.Module) -> tuple[MutableMapping[Any, Any], ...]:
    return vars(module), module._buffers, module._forward_hooks, module._forward_pre_hooks


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Give the buffers of ``model`` the values back that they had: they are real, and a forward may count in them."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in before:
                buffer.copy_(values)


@contextmanager
def rehearsing(model: nn.Module) -> Iterator[None]:
    """Have ``model`` be in eval mode, and afterwards as it was, part by part, and torch's random numbers too. It may be
    the user's own.
    """
    before = [(module, module.training) for module in model.modules()]
    try:
        with torch.random.fork_rng(devices=[]):
            model.eval()
            yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the logger of fake tensors: torch logs a traceback where an operator refuses them."""
    logger = logging.getLogger(fake_tensor.__name__)
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
