"""Hooks that ``torch.compile`` leaves alone: a model that is compiled is cut into graphs at them.

What a hook does to a model (waiting for a read, binding a weight) is nothing that a graph can hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_compiling = torch._C._dynamo.eval_frame.get_eval_frame_callback
_REASON = (
    "hooks bring in the weights of a dispatched model, and no graph holds them: compile it without fullgraph=True, or "
    "the plain one; export the plain one"
)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` as one that isn't traced, and nothing that it calls is.

    Importing the compiler takes seconds, so it is told only once it is at work.
    """
    untraced: list[Callable[..., Any]] = []

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():  # as the tracer sees it, which ends here and tells why if it must not
            torch._dynamo.graph_break(msg=_REASON)
        if _compiling() is None:
            return function(*args)
        if not untraced:
            from torch._dynamo.eval_frame import skip_code

            untraced.append(torch.compiler.disable(function, reason=_REASON))  # type: ignore[no-untyped-call]
            skip_code(call.__code__)  # or this function would be compiled anew for each module
        return untraced[0](*args)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return call
