"""Experts that wait compute as they do in memory: the same bits, whichever implementation, however few slots."""

import copy
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from offstage.stages.dispatch.experts.expert_stack import _multiply_one
from offstage.stages.dispatch.streaming.waiting_tensor import state_on_host
from offstage.stages.empty_init.experts import is_experts
from tests.stages.dispatch.experts.mixtures import CONFIGS, mixture, waiting_experts

TOKENS = torch.arange(2, 82).reshape(2, 40)


def answers(model: nn.Module) -> list[torch.Tensor]:
    """Return the logits of two prompts and of one short one, and what is generated after it."""
    with torch.inference_mode():
        return [
            model(TOKENS).logits,
            model(TOKENS[:, :1]).logits,
            model.generate(TOKENS, max_new_tokens=3, num_beams=2),
        ]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_bits_are_those_of_the_model_in_memory(name: str) -> None:
    model = mixture(name)
    expected = answers(model)
    for slots in (1, 5, 1000):
        with waiting_experts(model, slots) as (routed, traffic):
            assert equal(answers(model), expected)
            assert 0 < traffic.streamed_bytes == sum(use.streamed_bytes for use in routed.uses.values())
    assert equal(answers(model), expected)


IMPLEMENTATIONS = ["grouped_mm", "batched_mm", "eager"]


@pytest.mark.parametrize(
    ("name", "experts"), [*product(["Mixtral", "gpt-oss", "DeepSeek-V3"], IMPLEMENTATIONS), ("Llama 4", "its own")]
)
def test_each_implementation_of_transformers_is_itself(name: str, experts: str) -> None:
    model = mixture(name, torch.float32, experts=experts)
    expected = answers(model)
    for slots in (2, 1000):
        with waiting_experts(model, slots):
            assert equal(answers(model), expected)


def test_only_what_tokens_are_routed_to_is_brought_and_what_is_kept_not_again() -> None:
    model = mixture("Mixtral")
    layers = [layer.mlp.experts for layer in model.model.layers]
    row = sum(parameter[0].nbytes for parameter in layers[0].parameters())
    with waiting_experts(model, 1000) as (routed, traffic), torch.inference_mode():
        routed_to: list[set[int]] = []
        for each in layers:
            each.register_forward_pre_hook(lambda _m, args: routed_to.append(set(args[1].flatten().tolist())))
        model(TOKENS[:1, :1])
        first = sum(map(len, routed_to))
        assert traffic.streamed_bytes == first * row
        model(TOKENS[:1, :1])
        assert traffic.streamed_bytes == first * row
        assert (traffic.expert_hits, traffic.expert_misses) == (first, first)
        assert all(use.evictions == 0 for use in routed.uses.values())


def test_rows_of_zeros_say_which_experts_a_token_is_not_routed_to() -> None:
    model = mixture("Llama 4")
    experts = experts_of(model)
    row = sum(parameter[0].nbytes for parameter in experts[0].parameters())
    with waiting_experts(model, 1000) as (_, traffic), torch.inference_mode():
        model(TOKENS[:1, :1])
        assert (traffic.expert_hits, traffic.expert_misses) == (0, len(experts))
        assert traffic.streamed_bytes == len(experts) * row
        model(TOKENS[:1, :1])
        assert (traffic.expert_hits, traffic.streamed_bytes) == (len(experts), len(experts) * row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_multiplied_by_batches_have_the_bits_of_the_whole_stack(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    for count, tokens, rows, columns in product((2, 3, 16), (1, 5, 33), (24, 512), (64, 200)):
        stack = torch.randn(count, rows, columns, generator=random).to(dtype)
        left = torch.zeros(count, tokens, rows, dtype=dtype)
        left[:2, 0] = torch.randn(2, rows, generator=random).to(dtype)
        whole = torch.bmm(left, stack)
        for expert in (0, 1):
            assert torch.equal(_multiply_one(torch.bmm, left[expert], stack[expert]), whole[expert])


def test_a_long_prompt_brings_each_expert_once_however_few_slots_there_are() -> None:
    model = mixture("Mixtral")
    whole = sum(p.nbytes for layer in model.model.layers for p in layer.mlp.experts.parameters())
    with waiting_experts(model, 2) as (_, traffic), torch.inference_mode():
        model(TOKENS)
        assert traffic.streamed_bytes <= whole


@pytest.mark.parametrize(("name", "experts"), [*product(["Qwen3-MoE"], IMPLEMENTATIONS), ("Llama 4", "its own")])
def test_what_a_backward_pass_needs_is_brought_again_and_no_expert_is_kept_for_it(name: str, experts: str) -> None:
    model = mixture(name, torch.float32, experts=experts)
    embedded = model.get_input_embeddings()(TOKENS[:1, :3]).detach()
    one = experts_of(model)[0]
    weights = {tuple(sorted(stack.shape[1:])) for stack in (one.down_proj, one.gate_up_proj)}
    dense = {parameter.data_ptr() for name, parameter in model.named_parameters() if ".experts." not in name}
    kept: set[tuple[int, ...]] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in dense:
            kept.add(tuple(sorted(tensor.shape[-2:])))
        return tensor.detach()

    def gradient() -> torch.Tensor:
        given = embedded.clone().requires_grad_()
        kept.clear()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(inputs_embeds=given).logits.square().sum()
        loss.backward()
        assert given.grad is not None
        return given.grad

    expected = gradient()
    assert weights <= kept
    with waiting_experts(model, 3) as (_, traffic):
        assert torch.equal(gradient(), expected)
        assert not weights & kept
        assert traffic.streamed_bytes <= 3 * traffic.expert_misses * expert_bytes(model)


def test_a_backward_after_the_slots_are_gone_reads_what_it_needs() -> None:
    model = mixture("Mixtral", torch.float32)
    embedded, gradients = model.get_input_embeddings()(TOKENS[:1, :3]).detach(), []
    for slots in (None, 3):
        given = embedded.clone().requires_grad_()
        with waiting_experts(model, slots) if slots else nullcontext():
            loss = model(inputs_embeds=given).logits.square().sum()
        loss.backward()
        gradients.append(given.grad)
    assert torch.equal(*gradients)


def expert_bytes(model: nn.Module) -> int:
    return sum(parameter[0].nbytes for parameter in experts_of(model)[0].parameters())


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if is_experts(module)]


def test_other_code_that_uses_a_stack_reads_all_of_it() -> None:
    model = mixture("Mixtral")
    experts = model.model.layers[0].mlp.experts
    expected = experts.down_proj.detach().clone()
    with waiting_experts(model, 2):
        assert torch.equal(experts.down_proj + 0, expected)
        assert torch.equal(experts.down_proj[1:3] + 0, expected[1:3])
        assert torch.equal(experts.down_proj.transpose(1, 2) + 0, expected.transpose(1, 2))


def test_an_error_in_a_call_leaves_the_model_as_it_was() -> None:
    model = mixture("Mixtral")
    expected = answers(model)
    activation = model.model.layers[1].mlp.experts.act_fn
    with waiting_experts(model, 2):
        handle = activation.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(TOKENS)
        handle.remove()
        assert equal(answers(model), expected)


def test_a_state_dict_and_a_copy_of_a_model_whose_experts_wait_have_them_whole() -> None:
    model = mixture("Mixtral")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with waiting_experts(model, 2):
        state = state_on_host(model)
        copied = state_on_host(copy.deepcopy(model.model.layers[1].mlp.experts))
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert copied
    assert all(torch.equal(copied[name], expected[f"model.layers.1.mlp.experts.{name}"]) for name in copied)


def test_code_that_asks_for_a_whole_stack_has_it_and_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model = mixture("Mixtral")
    experts = experts_of(model)[0]
    whole = experts.gate_up_proj.nbytes
    expected = experts.gate_up_proj.sum()
    given = (torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2))
    sums = []
    with waiting_experts(model, 2) as (_, traffic), torch.inference_mode():
        experts.forward = lambda *_: sums.append(experts.gate_up_proj.sum())
        for _ in range(2):
            experts(*given)
        del experts.forward
    assert sums == [expected, expected]
    assert traffic.overflow_bytes == whole
    assert caplog.text.count("asks for all experts of a stack at once") == 1
