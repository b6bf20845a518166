from typing import Any

import pytest
import torch
from torch import nn

from offstage.stages.dispatch import CpuOffload, UserCpuOffloadHook, add_hook_to_module, cpu_offload_with_hook
from tests.stages.dispatch.models_to_offload import Net, anatomy, same_anatomy, seeded

X = torch.randn(2, 4)


class Traveller(nn.Linear):
    """Notes where it is sent, and stays at home: this machine may have no second device."""

    def __init__(self, name: str, diary: list[str]) -> None:
        super().__init__(4, 4)
        self.name, self.diary, self.at = name, diary, "cpu"

    def to(self, device: Any) -> "Traveller":
        if str(device) != self.at:
            self.at = str(device)
            self.diary.append(f"{self.name} to {device}")
        return self


class Work(CpuOffload):
    """Sends its module to a device that its inputs don't follow it to."""

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        super().pre_forward(module)
        return args, kwargs


def chain(*names: str) -> tuple[list[Traveller], list[UserCpuOffloadHook], list[str]]:
    diary, models, hooks = list[str](), list[Traveller](), list[UserCpuOffloadHook]()
    for name in names:
        model = Traveller(name, diary)
        hook = Work("meta", hooks[-1] if hooks else None)
        add_hook_to_module(model, hook)
        models.append(model)
        hooks.append(UserCpuOffloadHook(model, hook))
    return models, hooks, diary


def test_running_the_second_model_sends_the_first_one_back() -> None:
    (first, second), hooks, diary = chain("first", "second")
    first(X)
    second(X)
    assert diary == ["first to meta", "first to cpu", "second to meta"]
    hooks[1].offload()
    assert diary[3:] == ["second to cpu"], "the last one is sent back by hand"
    first(X)
    assert diary[4:] == ["first to meta"]


def test_a_loop_keeps_its_model_in_place() -> None:
    (first, second, third), _, diary = chain("first", "second", "third")
    first(X)
    for _ in range(5):
        second(X)
    third(X)
    expected = ["first to meta", "first to cpu", "second to meta", "second to cpu", "third to meta"]
    assert diary == expected


def test_a_model_is_on_the_host_until_it_is_called_and_its_hook_goes_without_a_trace() -> None:
    model = seeded(Net)
    expected, before = model(X[:, :3]), anatomy(model)
    same, hook = cpu_offload_with_hook(model, execution_device="cpu")
    assert same is model
    assert isinstance(hook, UserCpuOffloadHook)
    assert torch.equal(model(X[:, :3]), expected)
    hook.remove()
    assert same_anatomy(before, anatomy(model))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the default is the accelerator")
def test_the_default_device_is_the_cpu_where_there_is_no_accelerator() -> None:
    assert CpuOffload().execution_device == torch.device("cpu")


def test_hooks_of_the_user_run_as_well() -> None:
    (model,), _, _ = chain("first")
    _, hook = cpu_offload_with_hook(model, execution_device="cpu")
    assert model._hf_hook.hooks[1] is hook.hook
