"""A sample is its prompt's own: not its batch's."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack
from transformers import LlamaConfig, LlamaForCausalLM

from offstage.stages.generate.sampling import SeededRows, seeded_rows
from offstage.stages.inference.padding import make_batch

PROMPTS = [[5, 6, 7, 8], [9, 4, 3, 1], [2, 2, 6, 7]]
SAMPLED = {"do_sample": True, "min_new_tokens": 8, "max_new_tokens": 8}
"""None ends before the others, which would have it padded beside them alone."""


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, **shape)).double().eval()


def sampled(llama: LlamaForCausalLM, prompts: list[list[int]], seeds: list[int], **options: object) -> list[list[int]]:
    batch = make_batch(prompts, pad=0, side="left")
    with SeededRows(llama), seeded_rows(seeds):
        return llama.generate(batch.input_ids, attention_mask=batch.attention_mask, **SAMPLED, **options).tolist()


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_return_sequences": 2}], ids=str)
def test_a_prompt_draws_the_same_alone_and_beside_others(llama: LlamaForCausalLM, options: dict[str, int]) -> None:
    together = sampled(llama, PROMPTS, [3, 4, 5], **options)
    alone = [
        row
        for prompt, seed in zip(PROMPTS, [3, 4, 5], strict=True)
        for row in sampled(llama, [prompt], [seed], **options)
    ]
    assert together == alone


def test_alone_it_draws_what_transformers_draws(llama: LlamaForCausalLM) -> None:
    torch.manual_seed(11)
    tokens = torch.tensor([PROMPTS[0]])
    theirs = llama.generate(tokens, attention_mask=torch.ones_like(tokens), **SAMPLED).tolist()
    assert sampled(llama, PROMPTS[:1], [11]) == theirs


def test_the_mode_is_left_while_the_model_computes_and_after_an_interrupt_in_it(llama: LlamaForCausalLM) -> None:
    tokens, seen = torch.tensor([PROMPTS[0]]), list[int]()

    def interrupt(*_: object) -> None:
        seen.append(len(_get_current_function_mode_stack()))
        raise KeyboardInterrupt

    before = len(_get_current_function_mode_stack())
    with SeededRows(llama) as mode:
        llama(tokens)
        assert _get_current_function_mode_stack()[-1] is mode
        hook = llama.model.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            llama(tokens)
    hook.remove()
    assert seen == [before]
    assert len(_get_current_function_mode_stack()) == before
    assert not llama._forward_pre_hooks
