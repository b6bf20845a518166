"""What torch keeps for a thread is each call's own, where several take turns in one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import offstage
from offstage.stages.dispatch.streaming.lockstep import Lockstep
from offstage.stages.dispatch.streaming.module_state import ModuleState
from tests.stages.dispatch.streaming.lockstep_grid import WORDS, opened, saved

AUTOCAST = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


@dataclass(frozen=True)
class Part:
    position: tuple[int, ...] = (0,)

    def expect(self, users: int) -> None:
        pass


class Watch(TorchFunctionMode):
    """Sees all functions that are called, and has whoever calls ``neg`` wait for its turn in the middle of it."""

    def __init__(self) -> None:
        super().__init__()
        self.group, self.seen = Lockstep(1, ModuleState(nn.Module())), list[str]()

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
        watch.group = Lockstep(2, ModuleState(nn.Module()))
        watch.group.run([first, second])
        torch.sin(one)
    assert [name for name in watch.seen if name in ("neg", "abs", "sqrt", "sin")] == ["neg", "abs", "sqrt", "sin"]
    assert [float(answer) for answer in answers] == [1.0, -1.0, 1.0]


class Doubles(TorchDispatchMode):
    """Has all sums of two tensors be twice as large, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.add.Tensor:
            return result
        self.sums += 1
        return result + result


def logits(model: Any, ids: torch.Tensor, around: Callable[[], AbstractContextManager[Any]]) -> torch.Tensor:
    """Return what three forwards over ``ids`` give, of which the last two are inside ``around``."""
    outputs = [model(ids).logits]
    with around():
        outputs += [model(ids).logits for _ in range(2)]
    return torch.cat([*outputs, model(ids).logits]).clone()


def test_autocast_inference_mode_and_overrides_are_those_of_the_call_that_entered_them(
    tmp_path: Path,
) -> None:
    plain = saved(tmp_path / "checkpoint", "llama", torch.float32)
    entered = [AUTOCAST, nullcontext, torch.inference_mode, partial(AUTOCAST, dtype=torch.float16), Doubles,
               partial(torch.autocast, "cpu"), torch.no_grad]  # fmt: skip
    asked = [torch.randint(3, WORDS, (1, 2 + place)) for place in range(len(entered))]
    with torch.no_grad():
        wanted = [logits(plain, ids, around) for ids, around in zip(asked, entered, strict=True)]
    assert len({each.shape[1:] for each in wanted}) == len(entered)
    assert not any(torch.equal(wanted[place][0], wanted[place][1]) for place in (0, 3, 4, 5))
    with opened(tmp_path) as loaded:
        tasks = [partial(logits, loaded.model, ids, around) for ids, around in zip(asked, entered, strict=True)]
        for _ in range(2):
            assert all(map(torch.equal, offstage.lockstep(loaded.model, tasks, size=4), wanted))
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def test_what_a_call_leaves_on_as_it_ends_holds_for_no_other(tmp_path: Path) -> None:
    plain = saved(tmp_path / "checkpoint", "llama", torch.float32)
    ids = torch.tensor([[5, 6, 7]])

    def careless() -> torch.Tensor:
        output: torch.Tensor = loaded.model(ids).logits
        torch.set_autocast_enabled("cpu", True)
        torch.set_grad_enabled(True)
        return output

    with opened(tmp_path) as loaded, torch.no_grad():
        tasks = [careless, partial(logits, loaded.model, ids, nullcontext)]
        _, answer = offstage.lockstep(loaded.model, tasks, size=2)
        assert torch.equal(answer, logits(plain, ids, nullcontext))
        assert not torch.is_autocast_enabled("cpu")
