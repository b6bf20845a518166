"""Hooks on modules: code that runs before and after a module's forward, and what puts it there.

Names and behaviour are those that scripts written against accelerate know. They are built on torch's own module hooks:
``forward`` is never replaced, an exception inside it is noticed, and a module without its hooks is what it was.
A hook therefore sees calls of the module, not of its ``forward``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offstage.stages.dispatch.streaming.guard import unguard

_GUARDED_BY_ACCELERATE = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa")


class ModelHook:
    """What a hook does at the four moments that it is told of; this one does nothing.

    With ``no_grad`` the forward runs without recording gradients; ``pre_forward`` and ``post_forward`` do not. A
    ``permanent`` hook isn't replaced by the next one that is added: it stays, and runs first.
    """

    no_grad: bool = False
    permanent: bool = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare ``module``, to which the hook is being added, and return it."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for the forward that is about to run."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return what the call returns, given the forward's ``output``."""
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Undo ``pre_forward``: called in place of ``post_forward`` where that, or the forward, raised."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Leave ``module``, from which the hook is being removed, as it was before, and return it."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one: each gets what the one before it returned.

    >>> class AddsOne(ModelHook):
    ...     def post_forward(self, module, output):
    ...         return output + 1
    >>> layer = add_hook_to_module(nn.Identity(), SequentialHook(AddsOne(), AddsOne()))
    >>> layer(torch.ones(1))
    tensor([3.])
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks
        self.no_grad = any(hook.no_grad for hook in hooks)
        self.permanent = any(getattr(hook, "permanent", False) for hook in hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare ``module`` with every hook in turn."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass the arguments through every hook in turn."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Pass the output through every hook in turn."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Tell every hook."""
        for hook in self.hooks:
            _tell_failed(hook, module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Take every hook off, the last one first."""
        for hook in reversed(self.hooks):
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Add ``hook`` to ``module`` and return the module; ``module._hf_hook`` is the hook that it has.

    A module has one hook: the one before is removed, or with ``append`` runs first, both in a ``SequentialHook``.

    >>> class Doubles(ModelHook):
    ...     def post_forward(self, module, output):
    ...         return 2 * output
    >>> layer = add_hook_to_module(nn.Identity(), Doubles())
    >>> layer(torch.ones(1))
    tensor([2.])
    """
    before = getattr(module, "_hf_hook", None)
    append = append or getattr(before, "permanent", False)
    if before is not None and not append:
        remove_hook_from_module(module)
    module = hook.init_hook(module)
    if before is not None and append:
        _detach(module)
        hook = SequentialHook(before, hook)
    module._hf_hook = hook  # type: ignore[assignment]
    module._old_forward = _OldForward(module)  # type: ignore[assignment]
    module._attached_hook = _Attached(module, hook)  # type: ignore[assignment]
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove the hook of ``module``, if it has one, and with ``recurse`` those of its submodules; return the module.

    A hook that accelerate attached, whose functions share these names, is removed as well.

    >>> layer = add_hook_to_module(nn.Identity(), ModelHook())
    >>> remove_hook_from_module(layer) is layer
    True
    """
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        _detach(module)
        module = hook.detach_hook(module)
        unguard(module)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of ``module`` and of all its submodules.

    >>> model = cpu_offload(nn.Sequential(nn.Linear(2, 2)), "cpu")
    >>> remove_hook_from_submodules(model)
    """
    remove_hook_from_module(module, recurse=True)


def hooks_of(module: nn.Module) -> Iterator[ModelHook]:
    """Yield the hooks of ``module``, those of a ``SequentialHook`` one by one."""
    waiting = [getattr(module, "_hf_hook", None)]
    while waiting:
        hook = waiting.pop()
        if isinstance(hook, SequentialHook):
            waiting += reversed(hook.hooks)
        elif hook is not None:
            yield hook


def _detach(module: nn.Module) -> None:
    """Take from ``module`` what ``add_hook_to_module`` gave it, ours or the one of the same name in accelerate.

    That one puts a forward of its own on the module (of a traced graph, on its class), and methods that guard moves.
    """
    attached: Any = vars(module).pop("_attached_hook", None)
    old_forward = vars(module).pop("_old_forward", None)
    if attached is not None:
        attached.remove()
    elif old_forward is not None:
        (module if "forward" in vars(module) else type(module)).forward = old_forward
        for name in _GUARDED_BY_ACCELERATE:
            vars(module).pop(name, None)
    del module._hf_hook


def _tell_failed(hook: ModelHook, module: nn.Module) -> None:
    """Have ``hook`` undo its ``pre_forward``; a hook of another library can't."""
    failed = getattr(hook, "forward_failed", None)
    if failed is not None:
        failed(module)


class _Attached:
    """One hook on one module: translates torch's hooks into ours.

    It runs as close to the forward as torch allows: after the other pre-hooks that are there, before the other
    forward hooks. ``_running`` has, for every call that is under way, the grad mode and the exception that was being
    handled when it began: if it is not the same at the end, the forward has raised, for torch doesn't say so.
    """

    def __init__(self, module: nn.Module, hook: ModelHook) -> None:
        self._hook = hook
        self._running: list[tuple[bool, BaseException | None]] = []
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self.before, with_kwargs=True),
            module.register_forward_hook(self.after, prepend=True, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._running.append((torch.is_grad_enabled(), sys.exception()))
        arguments = self._hook.pre_forward(module, *args, **kwargs)
        if self._hook.no_grad:
            torch.set_grad_enabled(False)
        return arguments

    def after(self, module: nn.Module, _args: Any, output: Any) -> Any:
        if not self._running:
            return None  # another hook raised before this one was reached
        had_grad, handled = self._running.pop()
        if self._hook.no_grad:
            torch.set_grad_enabled(had_grad)
        done = False
        try:
            if sys.exception() is handled:
                output = self._hook.post_forward(module, output)
                done = True
        finally:
            if not done:
                _tell_failed(self._hook, module)
        return output


class _OldForward:
    """What scripts look for as ``module._old_forward``: the module's own forward, without keeping the module alive."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    @property
    def __wrapped__(self) -> Any:
        """The forward itself, for those who ask for its signature: that of the class where this stands in its place.

        So it does too where another library's hook, which wraps what it found, has put a forward of its own there.
        """
        module: Any = self._module()
        forward = wraps = getattr(module, "forward", None)
        while wraps is not None and wraps is not self:
            wraps = getattr(wraps, "__dict__", {}).get("__wrapped__")
        return forward if wraps is None else type(module).forward.__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _OldForward, (self._module(),)
