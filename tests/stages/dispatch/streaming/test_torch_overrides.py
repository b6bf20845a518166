"""Which functions are overridden is each call's own, where several take turns in one thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from stages.dispatch.streaming.lockstep import Lockstep


@dataclass(frozen=True)
class Part:
    place: tuple[int, ...] = (0,)

    def expect(self, users: int) -> None:
        pass


class Watch(TorchFunctionMode):
    """Sees all functions that are called, and has whoever calls ``neg`` wait for its turn in the middle of it."""

    def __init__(self) -> None:
        super().__init__()
        self.group, self.seen = Lockstep(1), list[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        if func is torch.neg:
            with torch._C.DisableTorchFunctionSubclass():
                self.group.wait_for(Part())
        return func(*args, **(kwargs or {}))


def test_a_call_that_waits_inside_an_override_leaves_it_on_for_the_others() -> None:
    one, answers = torch.ones(1), list[Any]()

    def first() -> None:
        answers.append(torch.neg(one))
        answers.append(torch.sqrt(one))

    def second() -> None:
        answers.append(torch.abs(one))
        assert torch._C._is_torch_function_enabled()

    with torch.no_grad(), Watch() as watch:
        watch.group = Lockstep(2)
        watch.group.run([first, second])
        torch.sin(one)
    assert [name for name in watch.seen if name in ("neg", "abs", "sqrt", "sin")] == ["neg", "abs", "sqrt", "sin"]
    assert [float(answer) for answer in answers] == [1.0, -1.0, 1.0]
