"""A model whose weights lie on several devices must not be moved, and must say which device it computes on.

``model.to`` would tear what was placed apart, and ``model.device`` of a transformers model is the device of the first
parameter, which may be waiting on meta. Both are answered by a subclass of the model's own class, of the same name, so
that nothing on the instance is overwritten; the class comes back when the hooks go. Parts of the model that have
weights of it which wait refuse to be moved too. They keep their classes, by which libraries choose layers.
"""

from __future__ import annotations

import copy
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import nn

from offstage.stages.dispatch.streaming.waiting_tensor import WaitingTensor, rebuild, state_on_host
from offstage.stages.empty_init.skeleton import parent, upward

_log = logging.getLogger(__name__)
_MARK = "_class_before_dispatch"
_STREAMED = "_streamed_weights"
_MAP = "hf_device_map"
_APPLY = "_apply"
_CALL_ENCODER = tuple(f"_prepare_{text}encoder_decoder_kwargs_for_generation" for text in ("text_", ""))
"""The method of transformers that calls an encoder, as its releases name it."""
_COMPILES = "_valid_auto_compile_criteria"


def guard(model: nn.Module, main_device: torch.device, *, streamed: tuple[str, ...]) -> None:
    """Make ``model`` refuse to be moved and name ``main_device`` as its device.

    ``streamed`` are weights that are brought in for each use, wherever they wait; those on meta are seen to be.
    A model that has no property ``device`` gets none.
    """
    unguard(model)
    kind = type(model)
    body: dict[str, Any] = {"_apply": _apply, _STREAMED: streamed}
    if isinstance(getattr(kind, "device", None), property):
        body["device"] = property(lambda self: main_device)
    body |= {name: method for name, method in _METHODS.items() if hasattr(kind, name)}
    if streamed and hasattr(kind, _COMPILES):
        body[_COMPILES] = _never_compile
    _have_subclass(model, {**body, "__reduce_ex__": _reduce_ex})
    owners = {parent(name) for name in streamed}
    for name in {around for owner in owners for around in upward(owner) if around}:
        part = model.get_submodule(name)
        vars(part)[_APPLY] = _ApplyOfPart(part, model)


def refuse_calls(module: nn.Module, refusal: str) -> None:
    """Have each call of ``module`` be refused before anything else is done."""
    module.register_forward_pre_hook(_refusing(refusal), prepend=True)


def shut(model: nn.Module, refusal: str) -> None:
    """Have ``model``, whose streamed weights are gone, refuse all other use than calls, and each part calls, too.

    That is each part that has some of these weights. Calls of the model are refused already: see ``refuse_calls``.
    """
    unguard(model)
    refused = ("_apply", "state_dict", "__reduce_ex__", *_METHODS)
    body = {name: _refusing(refusal) for name in refused if hasattr(type(model), name)}
    _have_subclass(model, {**body, "__deepcopy__": _refusing(refusal)})
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if module is not model and any(tensor.is_meta for tensor in own):
            refuse_calls(module, refusal)


def _refusing(refusal: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(refusal)

    return refuse


def _have_subclass(model: nn.Module, body: Mapping[str, Any]) -> None:
    """Have ``model`` be of a subclass of its class that passes for that, with ``body``."""
    kind = type(model)
    named = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__qualname__": kind.__qualname__}
    model.__class__ = type(kind.__name__, (kind,), {**body, **named, _MARK: kind})


def is_guarded(model: nn.Module) -> bool:
    """Return whether ``model`` has been dispatched."""
    return _MARK in vars(type(model))


def unguard(model: nn.Module) -> None:
    """Give ``model`` its own class back, if it has been dispatched."""
    if is_guarded(model):
        model.__class__ = vars(type(model))[_MARK]
        vars(model).pop(_MAP, None)
        for module in model.modules():
            if isinstance(vars(module).get(_APPLY), _ApplyOfPart):
                del vars(module)[_APPLY]


def _apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """Stand in for ``nn.Module._apply``, through which ``to``, ``cuda``, ``half`` and the like all go."""
    kind: Any = vars(type(self))[_MARK]
    if any(tensor.is_meta for tensor in _tensors(self)) or vars(type(self))[_STREAMED]:
        fn = _sparing_what_waits(self, fn)
    else:
        _log.warning("a dispatched model is being moved or cast: its hooks will send inputs to where the weights were")
    moved: nn.Module = kind._apply(self, fn, recurse)
    return moved


def _sparing_what_waits(module: nn.Module, fn: Any) -> Any:
    """Return ``fn``, of those that move and cast, for the tensors of ``module`` that don't wait; refuse any other.

    Trainers ask a model to be where it is, with adapters beside its weights: what changes no weight of the model is
    followed. What it would do to one shows on a small tensor of its dtype on the device where it is needed.
    """
    asked: dict[tuple[Any, ...], bool] = {}
    named = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in sorted(named, key=lambda one: not isinstance(one[1], WaitingTensor)):
        if not tensor.requires_grad or isinstance(tensor, WaitingTensor):
            used_on = tensor.needed_on if isinstance(tensor, WaitingTensor) else tensor.device
            kind = (tensor.dtype, used_on, tensor.dim())
            if kind not in asked:
                asked[kind] = _is_changed(fn, *kind)
            if asked[kind]:
                _refuse_to_move(tensor.source.name if isinstance(tensor, WaitingTensor) else name)
    return lambda tensor: tensor if isinstance(tensor, WaitingTensor) else fn(tensor)


def _is_changed(fn: Any, dtype: torch.dtype, device: torch.device, dimensions: int) -> bool:
    probe = torch.empty((2,) * dimensions, dtype=dtype, device=device)
    address = probe.data_ptr()
    return fn(probe) is not probe or probe.data_ptr() != address


def _tensors(module: nn.Module, recurse: bool = True) -> Iterator[torch.Tensor]:
    return chain(module.parameters(recurse), module.buffers(recurse))


def _refuse_to_move(waiting: str) -> NoReturn:
    """Refuse to move or cast a model, or a part of one, whose weight ``waiting`` would not follow."""
    raise RuntimeError(
        f"this model can't be moved or cast: some of its weights wait on the host or on disk, {waiting!r} first. "
        "After dispatch_model and its kin, remove_hook_from_submodules(model) brings them back; a model of the "
        "pipeline is placed by its plan: change max_memory, device_map or dtype and run again"
    )


class _ApplyOfPart:
    """Stands in for ``_apply`` of a ``part`` of ``model`` while that is guarded, as far as weights of the part wait.

    That of a copy, of no model, does what the part's own does: cast, it has its weights in memory.
    """

    def __init__(self, part: nn.Module, model: nn.Module | None) -> None:
        self._part = weakref.ref(part)
        self._model = None if model is None else weakref.ref(model)

    def __call__(self, fn: Any, recurse: bool = True) -> Any:
        part: Any = self._part()
        model = None if self._model is None else self._model()
        is_waited_for = any(isinstance(tensor, WaitingTensor) for tensor in _tensors(part, recurse))
        if model is not None and is_guarded(model) and is_waited_for:
            fn = _sparing_what_waits(part, fn)
        return type(part)._apply(part, fn, recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ApplyOfPart:
        return _ApplyOfPart(memo[id(self._part())], None)


def _reduce_ex(self: nn.Module, protocol: SupportsIndex, /) -> Any:
    """Stand in for what ``pickle`` and ``torch.save`` call: no pickle holds the files and threads that serve it.

    So do copies, which share them.
    """
    if sys._getframe(1).f_globals.get("__name__") == copy.__name__:
        return vars(type(self))[_MARK].__reduce_ex__(self, protocol)
    raise TypeError(
        "this model can't be pickled while it is dispatched: save it with its save_pretrained(folder), or save what "
        "get_state_dict_offloaded_model(model) returns"
    )


def _save_pretrained(self: Any, save_directory: Any, *args: Any, state_dict: Any = None, **options: Any) -> Any:
    """Stand in for transformers' method, which looks for what waits in hooks of another library.

    All weights are read to the host for it.
    """
    kind: Any = vars(type(self))[_MARK]
    with _without_map(self):
        state = state_on_host(self) if state_dict is None else state_dict
        return kind.save_pretrained(self, save_directory, *args, state_dict=state, **options)


def _calling_encoder(name: str) -> Callable[..., Any]:
    """Return what stands in for transformers' method ``name``, which calls the encoder: it would have another library's
    hook move the answer, which whoever is given that here moves to where it is used.
    """

    def encode(self: Any, *args: Any, **options: Any) -> Any:
        with _without_map(self):
            return getattr(vars(type(self))[_MARK], name)(self, *args, **options)

    return encode


@contextmanager
def _without_map(model: nn.Module) -> Iterator[None]:
    """Have ``model`` show no device map in the block: transformers takes one for a sign of another library."""
    device_map = vars(model).pop(_MAP, None)
    try:
        yield
    finally:
        if device_map is not None:
            setattr(model, _MAP, device_map)


def _resize_token_embeddings(self: Any, *args: Any, **options: Any) -> Any:
    """Stand in for transformers' method, which sets other data in place of a weight's.

    Embeddings that wait are read before, to where they compute, and stay there.
    """
    kind: Any = vars(type(self))[_MARK]
    read: dict[int, torch.Tensor] = {}
    for embeddings in filter(None, (self.get_input_embeddings(), self.get_output_embeddings())):
        own = embeddings.named_parameters(recurse=False)
        for name, waiting in [(name, tensor) for name, tensor in own if isinstance(tensor, WaitingTensor)]:
            if id(waiting) not in read:  # one of two that are tied
                read[id(waiting)] = rebuild(waiting, waiting.now(waiting.source.device).clone())
            setattr(embeddings, name, read[id(waiting)])
    return kind.resize_token_embeddings(self, *args, **options)


def _never_compile(_self: nn.Module, *_: Any) -> bool:
    """Say that ``generate`` must not compile the forward by itself, as it does for static caches on accelerators.

    It would be cut into a graph for each module, and compiled anew as weights come to other addresses.
    """
    return False


_METHODS = {
    "save_pretrained": _save_pretrained,
    "resize_token_embeddings": _resize_token_embeddings,
    **{name: _calling_encoder(name) for name in _CALL_ENCODER},
}
"""The methods of transformers' models that have to know of weights that wait."""
