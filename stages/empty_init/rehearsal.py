"""The rehearsal: a forward pass of the skeleton with fake tensors.

It computes nothing and allocates nothing, yet runs the model's own code, so it shows what no module tree says: in
which order modules are called, and which module reads a tensor that belongs to another one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from offstage.stages.calls.results import kept_cache
from offstage.stages.empty_init.experts import watch_routing
from offstage.stages.empty_init.fake_weights import Faking, fake_weights, quiet, swapped

_SCALINGS = (torch.ops.aten.mul_, torch.ops.aten.div_)
"""Operators that leave a tensor as it is where they are given one."""


@dataclass(slots=True)
class Rehearsal:
    """What a rehearsal saw.

    ``order``: modules by their first call; ``calls``: every call of a module that holds tensors, repeats included;
    ``users``: tensor name → the modules whose code read it; ``written``: the module that changes it. ``routed``: the
    experts that a token uses of each module of a mixture. ``decided`` says that what data decide was made up.
    """

    order: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    users: dict[str, set[str]] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    routed: dict[str, int] = field(default_factory=dict)
    decided: bool = False


def rehearse(
    model: nn.Module, call: Callable[[nn.Module], object] | None = None, *, decides: bool = False
) -> Rehearsal:
    """Run one forward of ``model``, whose parameters may be on meta, with fake tensors, and return what was seen.

    ``call`` runs the forward on the module that it is given; by default eight token ids in a batch of one. One that
    ``decides`` answers code that asks for values (see ``deciding``).
    Raises whatever the model's code raises when it meets fake tensors (one of ``fake_weights.REFUSALS``).
    """
    seen = Rehearsal(decided=decides)
    stack: list[str] = []
    with torch.no_grad(), quiet(), _Watching(seen, stack, decides=decides) as mode:
        fakes = fake_weights(model)
        for name, fake in fakes.items():
            mode.names.setdefault(id(fake), []).append(name)
        for name, tensor in (*fakes.items(), *model.named_buffers(remove_duplicate=False)):
            mode.stored.setdefault(tensor.untyped_storage()._cdata, []).append(name)
        with _watch_calls(model, seen, stack), watch_routing(model, seen.routed), swapped(model, fakes):
            (call or call_with_tokens)(model)
    return seen


def call_with_tokens(model: nn.Module, *, sequences: int = 1, length: int = 8) -> object:
    """Call ``model`` on ``sequences`` prompts of ``length`` token ids, the way ``generate`` calls a language model.

    Logits are asked for the last position alone, where the model can give those.
    """
    tokens = torch.ones((sequences, length), dtype=torch.long)
    config = getattr(model, "config", None)
    if config is None:
        return model(tokens)
    given: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = tokens[:, :1]
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        given["logits_to_keep"] = 1
    return model(**given)


def rehearse_next_token(model: nn.Module, first: Rehearsal | None) -> list[str]:
    """Return the calls of modules with tensors for a token after the one that ``first`` saw, of an encoder-decoder.

    What an encoder says that takes no tokens, so that there is no ``first``, is made up.
    Raises as ``rehearse`` does, and whatever else the model's code raises that keeps no cache.
    """
    call = _call_decoder if first is None else call_with_tokens
    before = first or rehearse(model, call)
    return rehearse(model, partial(_call_for_two_tokens, call), decides=before.decided).calls[len(before.calls) :]


def _call_decoder(model: Any) -> object:
    """Call ``model`` on a token and what its encoder might have said."""
    states = torch.zeros((1, 8, model.config.hidden_size), dtype=model.dtype)
    return model(encoder_outputs=(states,), decoder_input_ids=torch.ones((1, 1), dtype=torch.long))


def _call_for_two_tokens(call: Callable[[nn.Module], object], model: nn.Module) -> object:
    """Call ``model`` as ``call`` does, and for one more token with what that kept."""
    kept: Any = call(model)
    return model(
        encoder_outputs=(kept.encoder_last_hidden_state,),
        decoder_input_ids=torch.ones((1, 1), dtype=torch.long),
        **kept_cache(kept),
    )


def holds_tensors(module: nn.Module) -> bool:
    """Return whether ``module`` itself has parameters or buffers."""
    return any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False))


@contextmanager
def _watch_calls(model: nn.Module, seen: Rehearsal, stack: list[str]) -> Iterator[None]:
    """Note every call of a module of ``model`` in ``seen``, and keep the modules that are running on ``stack``."""
    handles = []
    entered: set[str] = set()
    for name, module in model.named_modules():

        def enter(_module: nn.Module, _args: Any, name: str = name, holds: bool = holds_tensors(module)) -> None:
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


class _Watching(Faking):  # type: ignore[no-untyped-call]
    """Fake tensors, and a note of which running module hands which weight to an operator, and which one it changes."""

    def __init__(self, seen: Rehearsal, stack: list[str], *, decides: bool) -> None:
        super().__init__(decides=decides)
        self._noted, self._running = seen, stack
        self.names: dict[int, list[str]] = {}
        """The names of each weight, by the id of the fake tensor that stands for it."""
        self.stored: dict[int, list[str]] = {}
        """The names of each weight and buffer, by the id of the storage that it and its views have."""
        self._kept: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *kwargs.values()) if kwargs else args:
            for leaf in _leaves(value):
                self._note(leaf)
        for changed in changed_tensors(func, args, kwargs or {}):
            for name in self.stored.get(changed.untyped_storage()._cdata, ()):
                self._noted.written.setdefault(name, self._module())
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.is_view:
            self._note_views(args[0], result)
        return result

    def _note_views(self, whole: torch.Tensor, result: object) -> None:
        """Note that ``result`` is in the place of ``whole``: a fake view of a real buffer has a storage of its own."""
        names = self.stored.get(whole.untyped_storage()._cdata, [])
        for view in _leaves(result) if names else ():
            storage = view.untyped_storage()
            self.stored.setdefault(storage._cdata, names)
            self._kept.append(storage)  # else another one would have its id

    def _note(self, leaf: object) -> None:
        for name in self.names.get(id(leaf), ()):
            self._noted.users.setdefault(name, set()).add(self._module())

    def _module(self) -> str:
        return self._running[-1] if self._running else ""


def changed_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator writes to, but where it leaves every value as it is (a product with one)."""
    if not func._schema.is_mutable or _is_neutral(func, args):
        return
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in _leaves(given) if isinstance(leaf, torch.Tensor))


def _is_neutral(func: Any, args: Sequence[Any]) -> bool:
    factor = args[1] if func.overloadpacket in _SCALINGS and len(args) > 1 else None
    return isinstance(factor, (int, float)) and factor == 1


def _leaves(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)
