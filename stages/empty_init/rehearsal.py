"""The rehearsal: a forward pass of the skeleton with fake tensors.

It computes nothing and allocates nothing, yet runs the model's own code, so it shows what no module tree says: in
which order modules are called, and which module reads a tensor that belongs to another one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

REFUSALS = (
    RuntimeError, TypeError, ValueError, AttributeError, LookupError, ImportError, AssertionError,
)  # fmt: skip
"""What a model's code may raise when it meets fake tensors: a rehearsal that fails is no error, only less is known."""


@dataclass(slots=True)
class Rehearsal:
    """What a rehearsal saw.

    ``order``: modules by their first call; ``calls``: every call of a module that holds tensors, repeats included;
    ``users``: tensor name → the modules whose code read it.
    """

    order: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    users: dict[str, set[str]] = field(default_factory=dict)


def rehearse(model: nn.Module, call: Callable[[nn.Module], object] | None = None) -> Rehearsal:
    """Run one forward of ``model``, whose parameters may be on meta, with fake tensors, and return what was seen.

    ``call`` runs the forward on the module that it is given; by default eight token ids in a batch of one.
    Raises whatever the model's code raises when it meets fake tensors (one of ``REFUSALS``).
    """
    seen = Rehearsal()
    stack: list[str] = []
    with torch.no_grad(), _quiet(fake_tensor.__name__), _Watching(seen, stack) as mode:
        fakes = _fake_weights(model)
        for name, fake in fakes.items():
            mode.names.setdefault(id(fake), []).append(name)
        with _watch_calls(model, seen, stack), _swapped(model, fakes):
            (call or call_with_tokens)(model)
    return seen


def call_with_tokens(model: nn.Module) -> object:
    """Call ``model`` on a batch of one prompt of eight token ids, the way a language model is called."""
    tokens = torch.ones((1, 8), dtype=torch.long)
    config = getattr(model, "config", None)
    if config is None:
        return model(tokens)
    if getattr(config, "is_encoder_decoder", False):
        return model(input_ids=tokens, attention_mask=torch.ones_like(tokens), decoder_input_ids=tokens[:, :1])
    return model(input_ids=tokens, attention_mask=torch.ones_like(tokens))


def _fake_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a fake cpu tensor for every parameter name; tied names share one."""
    made: dict[int, torch.Tensor] = {}
    weights = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in made:
            made[id(parameter)] = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        weights[name] = made[id(parameter)]
    return weights


@contextmanager
def _swapped(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Bind ``weights`` in place of the model's parameters; the parameters are back afterwards, whatever happened."""
    homes = [(model.get_submodule(name.rpartition(".")[0])._parameters, name) for name in weights]
    saved = [table[name.rpartition(".")[2]] for table, name in homes]
    try:
        for table, name in homes:
            table[name.rpartition(".")[2]] = weights[name]  # type: ignore[assignment]
        yield
    finally:
        for (table, name), parameter in zip(homes, saved, strict=True):
            table[name.rpartition(".")[2]] = parameter


@contextmanager
def _watch_calls(model: nn.Module, seen: Rehearsal, stack: list[str]) -> Iterator[None]:
    """Note every call of a module of ``model`` in ``seen``, and keep the modules that are running on ``stack``."""
    handles = []
    entered: set[str] = set()
    for name, module in model.named_modules():
        holds = any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False))

        def enter(_module: nn.Module, _args: Any, name: str = name, holds: bool = holds) -> None:
            stack.append(name)
            if name not in entered:
                entered.add(name)
                seen.order.append(name)
            if holds:
                seen.calls.append(name)

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            stack.pop()

        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Watching(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors, and a note of which running module hands which weight to an operator.

    One mode does both: operators are intercepted once and not twice, which halves the time that a rehearsal takes.
    """

    def __init__(self, seen: Rehearsal, stack: list[str]) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._noted, self._running = seen, stack
        self.names: dict[int, list[str]] = {}
        """The names of each weight, by the id of the fake tensor that stands for it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and guarding against it would cost each operator a detour

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *kwargs.values()) if kwargs else args:
            for leaf in value if isinstance(value, (list, tuple)) else (value,):
                self._note(leaf)
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _fake_grouped_mm(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note(self, leaf: object) -> None:
        for name in self.names.get(id(leaf), ()):
            self._noted.users.setdefault(name, set()).add(self._running[-1] if self._running else "")


def _fake_grouped_mm(left: torch.Tensor, right: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call the grouped product of a mixture's experts in bfloat16: torch knows the shape of no other dtype's."""
    product = torch.ops.aten._grouped_mm.default(left.bfloat16(), right.bfloat16(), *args, **kwargs)
    return product.to(left.dtype)  # type: ignore[no-any-return]


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Silence the logger ``name``: torch logs a traceback where an operator refuses fake tensors."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
