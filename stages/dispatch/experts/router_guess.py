"""Which experts a layer will probably want, before its turn: its router is asked of what the layer before it is given.

Layers add little to what passes through them, so the answer is mostly the true one (the speculative loading of
arXiv 2312.17238). What is asked is a stand-in for the block that holds the experts and their router: the same weights,
no hooks, and in the place of the experts something that hears what they are called for and ends the call. So nothing in
the model notices.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offstage.stages.empty_init.experts import routing

_log = logging.getLogger(__name__)


class _Routed(Exception):  # noqa: N818 - it is no error
    """Ends the call of a block once its router has spoken."""

    def __init__(self, index: torch.Tensor | None) -> None:
        self.index = index


class _Listener(nn.Module):
    """Stands in for ``experts``, and ends the call that it comes in."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self._routing: Callable[..., torch.Tensor | None] = lambda args, kwargs: routing(experts, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise _Routed(self._routing(args, kwargs))


class RouterGuess:
    """What the router in ``block`` would choose of ``experts``, a module in it. All that the block has beside them is
    where it computes.
    """

    def __init__(self, block: nn.Module, experts: nn.Module) -> None:
        leads_back = any("forward" in vars(module) for module in block.modules())  # replaced by one of the model's own
        self._block = None if leads_back else _stand_in(block, experts)

    def choose(self, hidden: torch.Tensor) -> list[int]:
        """Return the experts that ``hidden``, what a block is given, would be routed to: first choices first.

        Empty where the block can't be asked so; it isn't asked again.
        """
        if self._block is None:
            return []
        try:
            self._block(hidden.clone())
        except _Routed as routed:
            if routed.index is not None:
                return list(dict.fromkeys(routed.index.flatten(0, -2).t().flatten().tolist()))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is no fault of the pass
            _log.info("a router can't be asked ahead: %s", error)
        self._block = None
        return []


def _stand_in(module: nn.Module, experts: nn.Module) -> nn.Module:
    """Return a module with the weights of ``module`` that calls no hooks, and none of its ``experts``."""
    if module is experts:
        return _Listener(experts)
    children = {name: None if child is None else _stand_in(child, experts) for name, child in module._modules.items()}
    hooks = {name: OrderedDict[int, Any]() for name in vars(module) if name.endswith("_hooks")}
    buffers = {name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()}
    found = module.__class__.__new__(module.__class__)
    vars(found).update(vars(module), **hooks, _buffers=buffers, _modules=children)
    vars(found).update(_compiled_call_impl=None, training=False)
    return found
