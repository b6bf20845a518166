"""The rehearsal: a forward pass of the skeleton with fake tensors.

It computes nothing and allocates nothing, yet runs the model's own code, so it shows what no module tree says: in
which order modules are called, and which module reads a tensor that belongs to another one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from offstage.stages.calls.results import kept_cache
from offstage.stages.empty_init.experts import watch_routing
from offstage.stages.empty_init.fake_weights import REFUSALS, Faking, fake_weights, quiet, swapped
from offstage.stages.empty_init.module_usage import watch_calls
from offstage.stages.empty_init.repeated_blocks import AlikeBlocks, are_alike, find_alike

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
    """Trace one forward of ``model``, whose parameters may be on meta, with fake tensors; return what was seen.

    ``call`` runs the forward on the module that it is given; by default eight token ids in a batch of one. One that
    ``decides`` answers code that asks for values (see ``deciding``). Of repeated blocks that are alike a few are run,
    where nothing is decided, and all where these turn out not to do the same. Such a trace is called a rehearsal.
    Raises whatever the model's code raises when it meets fake tensors (one of ``fake_weights.REFUSALS``).

    >>> with init_empty_weights():
    ...     model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    >>> [str(name) for name in rehearse(model, lambda model: model(torch.ones(1, 4))).order]
    ['', '0', '1']
    """
    alike = [] if decides else find_alike(model)
    if alike:
        with suppress(*REFUSALS):
            seen, proven = _rehearse(model, call or call_with_tokens, alike, decides=False)
            if proven:
                return seen
    return _rehearse(model, call or call_with_tokens, (), decides=decides)[0]


def _rehearse(
    model: nn.Module, call: Callable[[nn.Module], object], alike: Sequence[AlikeBlocks], *, decides: bool
) -> tuple[Rehearsal, bool]:
    """Return what was seen, and whether all blocks that weren't run are proven to do as those that were."""
    seen = Rehearsal(decided=decides)
    stack: list[str] = []
    notes = _Notes(seen, {name for name, module in model.named_modules() if holds_tensors(module)})
    repeats = [_Repeats(blocks, notes) for blocks in alike]

    def enter(name: str, _given: object) -> None:
        stack.append(name)
        notes.note("call", name)

    with torch.no_grad(), quiet(), _Watching(notes, stack, decides=decides) as mode:
        fakes = fake_weights(model)
        for name, fake in fakes.items():
            mode.names.setdefault(id(fake), []).append(name)
        for name, tensor in (*fakes.items(), *model.named_buffers(remove_duplicate=False)):
            mode.stored.setdefault(tensor.untyped_storage()._cdata, []).append(name)
            mode.storages.append(tensor.untyped_storage())
        calls = watch_calls(model.named_modules(), enter, lambda _: stack.pop())
        with calls, watch_routing(model, seen.routed), swapped(model, fakes):
            for repeated in repeats:
                repeated.take_over(model)
            call(model)
    for repeated in repeats:
        repeated.copy_routing()
    return seen, all(repeated.proven for repeated in repeats)


def call_with_tokens(model: nn.Module, *, sequences: int = 1, length: int = 8, **beside: object) -> object:
    """Call ``model`` on ``sequences`` prompts of ``length`` token ids, the way ``generate`` calls a language model.

    Logits are asked for the last position alone, where the model can give those. ``beside`` is given too.
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
    return model(**given, **beside)


def call_with_next_token(model: nn.Module, *, sequences: int, length: int, **kept: object) -> object:
    """Call ``model`` on one more token of each prompt, the way ``generate`` does, with what their call ``kept``."""
    mask = torch.ones((sequences, length + 1), dtype=torch.long)
    return model(input_ids=mask[:, :1], attention_mask=mask, **kept)


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
    output: Any = call(model)
    return model(
        encoder_outputs=(output.encoder_last_hidden_state,),
        decoder_input_ids=torch.ones((1, 1), dtype=torch.long),
        **kept_cache(output),
    )


def holds_tensors(module: nn.Module) -> bool:
    """Return whether ``module`` itself has parameters or buffers."""
    return any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False))


class _Notes:
    """What is noted as a rehearsal goes on, one thing after the other: a block that isn't run is noted as another was.

    ``holding`` names the modules that hold tensors.
    """

    def __init__(self, seen: Rehearsal, holding: Collection[str]) -> None:
        self.seen, self._holding = seen, holding
        self._entered: set[str] = set()
        self.noted: list[tuple[str, str, str]] = []

    def note(self, what: str, name: str, module: str = "") -> None:
        """Note a ``call`` of the module ``name``, or that the code of ``module`` did ``read`` or ``write`` a tensor."""
        self.noted.append((what, name, module))
        if what == "read":
            self.seen.users.setdefault(name, set()).add(module)
        elif what == "write":
            self.seen.written.setdefault(name, module)
        else:
            if name not in self._entered:
                self._entered.add(name)
                self.seen.order.append(name)
            if name in self._holding:
                self.seen.calls.append(name)


@dataclass(slots=True)
class _ModuleCall:
    """The last call of a block: with what, what it returned, and the part of the notes that is of it."""

    given: tuple[Any, ...]
    returned: Any
    noted: slice


@dataclass(slots=True)
class _Repeats:
    """Blocks that are alike, in a rehearsal: those that aren't run are noted as their model was.

    That is where they are called with what is alike too, after it in the same pass.
    """

    blocks: AlikeBlocks
    notes: _Notes
    _calls: dict[str, _ModuleCall] = field(default_factory=dict)
    _last: int = -1
    _unproven: int = 0
    _refuted: bool = False

    @property
    def proven(self) -> bool:
        """Whether the last block, which was run, did as the model in each pass in which others were noted so."""
        return not self._unproven and not self._refuted

    def take_over(self, model: nn.Module) -> None:
        """Have the blocks of ``model`` be called through this; whoever swaps its weights undoes that."""
        for place, name in enumerate(self.blocks.names):
            block = model.get_submodule(name)
            vars(block)["forward"] = partial(self._call, place, block.forward)

    def copy_routing(self) -> None:
        """Note for the blocks that weren't run to how many experts a token is routed."""
        model, routed = self.blocks.model, self.notes.seen.routed
        for name, count in [(name, count) for name, count in routed.items() if _is_in(name, model)]:
            for skipped in self.blocks.skipped:
                routed[_moved(name, model, skipped)] = count

    def _call(self, place: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if place <= self._last:  # another pass has begun
            self._refuted |= self._unproven > 0
            self._calls.clear()
        self._last, name, given = place, self.blocks.names[place], (args, kwargs)
        model = self._calls.get(self.blocks.model)
        if name in self.blocks.skipped and model is not None and are_alike(model.given, given, 0):
            self._unproven += 1
            for what, *names in self.notes.noted[model.noted]:
                self.notes.note(what, *(_moved(noted, self.blocks.model, name) for noted in names))
            return model.returned
        begin = len(self.notes.noted)
        returned = forward(*args, **kwargs)
        self._calls[name] = _ModuleCall(given, returned, slice(begin, len(self.notes.noted)))
        if name == self.blocks.proof and model is not None:
            self._refuted |= not self._did_alike(model, self._calls[name])
            self._unproven = 0
        return returned

    def _did_alike(self, model: _ModuleCall, proof: _ModuleCall) -> bool:
        """Return whether two calls of blocks, with what is alike, did the same and returned what is alike."""
        done, noted = self.notes.noted[proof.noted], self.notes.noted[model.noted]
        moved = [
            (what, *(_moved(name, self.blocks.model, self.blocks.proof) for name in names)) for what, *names in noted
        ]
        return done == moved and are_alike((model.given, model.returned), (proof.given, proof.returned), 0)


def _is_in(name: str, block: str) -> bool:
    return name == block or name.startswith(f"{block}.")


def _moved(name: str, block: str, other: str) -> str:
    """Return ``name`` in ``other`` where it is in ``block``."""
    return other + name[len(block) :] if _is_in(name, block) else name


class _Watching(Faking):  # type: ignore[no-untyped-call]
    """Fake tensors, and a note of which running module hands which weight to an operator, and which one it changes."""

    def __init__(self, notes: _Notes, stack: list[str], *, decides: bool) -> None:
        super().__init__(decides=decides)
        self._notes, self._running = notes, stack
        self.names: dict[int, list[str]] = {}
        """The names of each weight, by the id of the fake tensor that stands for it."""
        self.stored: dict[int, list[str]] = {}
        """The names of each weight and buffer, by the id of the storage that it and its views have."""
        self.storages: list[torch.UntypedStorage] = []
        """These storages: code may let go of one (a module that it casts), and its id mustn't be another's then."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *kwargs.values()) if kwargs else args:
            for leaf in _leaves(value):
                for name in self.names.get(id(leaf), ()):
                    self._notes.note("read", name, self._module())
        for changed in changed_tensors(func, args, kwargs or {}):
            for name in self.stored.get(changed.untyped_storage()._cdata, ()):
                self._notes.note("write", name, self._module())
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
            self.storages.append(storage)

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
