import copy
import functools
import gc
import inspect
import pickle
import weakref

import pytest
import torch
from torch import nn

from offstage.stages.dispatch import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from tests.stages.dispatch.models_to_offload import Net, anatomy, same_anatomy, seeded

X = torch.randn(2, 3)


class AddToInput(ModelHook):
    def __init__(self, amount: float = 1.0) -> None:
        self.amount = amount

    def pre_forward(self, module, *args, **kwargs):
        return (args[0] + self.amount, *args[1:]), kwargs


class DoubleOutput(ModelHook):
    def post_forward(self, module, output):
        return output * 2


class Diary(ModelHook):
    def __init__(self, name: str, pages: list[str]) -> None:
        self.name, self.pages = name, pages

    def init_hook(self, module):
        self.pages.append(f"{self.name} init")
        return module

    def pre_forward(self, module, *args, **kwargs):
        self.pages.append(f"{self.name} pre")
        return args, kwargs

    def post_forward(self, module, output):
        self.pages.append(f"{self.name} post")
        return output

    def forward_failed(self, module) -> None:
        self.pages.append(f"{self.name} failed")

    def detach_hook(self, module):
        self.pages.append(f"{self.name} detach")
        return module


def test_a_hook_changes_what_goes_in_and_what_comes_out() -> None:
    model = seeded(Net)
    plain, shifted = model(X), model(X + 1)
    add_hook_to_module(model, AddToInput())
    assert torch.equal(model(X), shifted)
    add_hook_to_module(model, DoubleOutput())
    assert torch.equal(model(X), plain * 2), "without append it takes the place of the one before"


def test_appended_hooks_run_in_order_as_one() -> None:
    model, pages = seeded(Net), list[str]()
    for name in ("a", "b", "c"):
        add_hook_to_module(model, Diary(name, pages), append=True)
    assert isinstance(model._hf_hook, SequentialHook)
    assert len(model._hf_hook.hooks) == 2, "the first two are one hook to the third"
    model(X)
    remove_hook_from_module(model)
    expected = ["a init", "b init", "c init", "a pre", "b pre", "c pre", "a post", "b post", "c post"]
    assert pages == [*expected, "c detach", "b detach", "a detach"]


def test_a_hook_that_is_replaced_is_taken_off_first() -> None:
    model, pages = seeded(Net), list[str]()
    add_hook_to_module(model, Diary("a", pages))
    add_hook_to_module(model, Diary("b", pages))
    assert pages == ["a init", "a detach", "b init"]


def test_hooks_see_keyword_arguments() -> None:
    class Rename(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            return args, {"x": kwargs.pop("renamed")}

    model = seeded(Net)
    expected = model(X)
    add_hook_to_module(model, Rename())
    assert torch.equal(model(renamed=X), expected)


def test_forward_is_never_replaced_and_keeps_its_name_and_signature() -> None:
    model = seeded(Net)
    add_hook_to_module(model, ModelHook())
    assert "forward" not in vars(model)
    assert model.forward.__func__ is Net.forward
    assert list(inspect.signature(model.forward).parameters) == ["x"]
    assert list(inspect.signature(model._old_forward).parameters) == ["x"]
    assert torch.equal(model._old_forward(X), model(X))


def test_a_forward_that_wraps_the_old_one_has_its_signature_and_calls_it() -> None:
    model = seeded(Net)
    add_hook_to_module(model, ModelHook())
    expected, old = model(X), model._old_forward
    model.forward = functools.update_wrapper(functools.partial(old), old)  # as another library's hook puts it there
    assert list(inspect.signature(model.forward).parameters) == ["x"]
    assert torch.equal(model(X), expected)


def test_after_removal_a_module_is_what_it_was() -> None:
    model = seeded(Net)
    model.linear1.register_forward_hook(lambda _m, _a, _o: None)
    before = anatomy(model)
    for module in model.modules():
        add_hook_to_module(module, AddToInput())
        add_hook_to_module(module, DoubleOutput(), append=True)
    model(X)
    remove_hook_from_submodules(model)
    assert same_anatomy(before, anatomy(model))


def test_removal_is_for_one_module_unless_it_recurses() -> None:
    model = seeded(Net)
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
    assert remove_hook_from_module(model) is model
    assert [hasattr(m, "_hf_hook") for m in model.modules()] == [False, True, True, True]
    remove_hook_from_module(model, recurse=True)
    assert not any(hasattr(m, "_hf_hook") for m in model.modules())


def test_no_grad_is_for_the_forward_alone_and_may_be_switched() -> None:
    modes: list[bool] = []

    class Watch(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            modes.append(torch.is_grad_enabled())
            return args, kwargs

        def post_forward(self, module, output):
            modes.append(torch.is_grad_enabled())
            return output

    model, hook = seeded(Net), Watch()
    add_hook_to_module(model, hook)
    assert model(X).requires_grad
    hook.no_grad = True
    assert not model(X).requires_grad
    assert modes == [True] * 4
    assert torch.is_grad_enabled()


def test_an_exception_is_told_to_the_hook_instead_of_an_output() -> None:
    model, pages, hook = seeded(Net), list[str](), DoubleOutput()
    hook.no_grad = True
    add_hook_to_module(model, Diary("a", pages))
    add_hook_to_module(model.linear1, hook)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 9))
    assert pages == ["a init", "a pre", "a failed"]
    assert torch.is_grad_enabled()
    model(X)
    assert pages[3:] == ["a pre", "a post"]


def test_an_exception_in_a_hook_is_told_to_all_of_the_chain() -> None:
    class Broken(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            raise KeyError("no weight")

    class BrokenAfter(ModelHook):
        def post_forward(self, module, output):
            raise KeyError("no output")

    for broken in (Broken(), BrokenAfter()):
        model, pages = seeded(Net), list[str]()
        add_hook_to_module(model, SequentialHook(Diary("a", pages), broken))
        with pytest.raises(KeyError):
            model(X)
        assert pages[-1] == "a failed"


def test_a_model_called_while_an_exception_is_handled_ran_well_all_the_same() -> None:
    model, pages = seeded(Net), list[str]()
    add_hook_to_module(model, Diary("a", pages))
    try:
        raise ValueError("elsewhere")
    except ValueError:
        model(X)
    assert pages == ["a init", "a pre", "a post"]


def test_a_copy_has_hooks_of_its_own() -> None:
    model = seeded(Net)
    add_hook_to_module(model, AddToInput(1.0))
    twin = copy.deepcopy(model)
    twin._hf_hook.amount = 0.0
    expected = seeded(Net)
    assert torch.equal(twin(X), expected(X))
    assert torch.equal(model(X), expected(X + 1))
    assert torch.equal(twin._old_forward(X), expected(X))
    remove_hook_from_module(twin)
    assert torch.equal(model(X), expected(X + 1)), "the copy's removal leaves the original's hook"
    assert not twin._forward_hooks


def test_a_hooked_module_survives_pickle() -> None:
    model = nn.Linear(3, 3)
    add_hook_to_module(model, AddToInput(1.0))
    twin = pickle.loads(pickle.dumps(model))  # noqa: S301
    assert torch.equal(twin(X), model(X))


def test_a_hooked_model_is_freed_as_soon_as_it_is_let_go() -> None:
    model = seeded(Net)
    add_hook_to_module(model, AddToInput())
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_other_hooks_of_the_module_see_what_the_forward_sees_and_returns() -> None:
    model, seen = seeded(Net), list[torch.Tensor]()
    model.register_forward_hook(lambda _m, args, output: seen.extend([args[0], output]))
    expected = model(X + 1) * 2
    seen.clear()
    add_hook_to_module(model, SequentialHook(AddToInput(), DoubleOutput()))
    model(X)
    assert torch.equal(seen[0], X + 1)
    assert torch.equal(seen[1], expected)
