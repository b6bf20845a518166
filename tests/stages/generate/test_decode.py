from dataclasses import asdict

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from offstage.pipeline.errors import ConfigError
from offstage.stages.generate.decode import (
    FILLED,
    Clock,
    choose,
    decode_plainly,
    decode_with_transformers,
    end_tokens,
    has_generate,
    trim,
)
from offstage.stages.inference.logits import logits_of
from offstage.stages.inference.padding import make_batch

WORDS = 50


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=WORDS
    )
    return LlamaForCausalLM(config).eval()


class Bare(nn.Module):
    """The same model without anything of transformers' around it."""

    def __init__(self, llama: LlamaForCausalLM) -> None:
        super().__init__()
        self.llama = llama

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.llama(input_ids=tokens).logits


def reference(llama: LlamaForCausalLM, ids: list[int], **options: object) -> list[int]:
    tokens = torch.tensor([ids])
    return llama.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[0, len(ids) :].tolist()


def test_transformers_generate_is_called_with_the_options_as_they_are(llama: LlamaForCausalLM) -> None:
    batch, clock = make_batch([[5, 6, 7]], pad=0, side="left"), Clock()
    options = {"max_new_tokens": 6, "num_beams": 2}
    tokens = decode_with_transformers(llama, asdict(batch), options, device=torch.device("cpu"), clock=clock)
    assert tokens[0].tolist() == reference(llama, [5, 6, 7], **options)
    assert len(clock.times) == 6
    assert clock.times == sorted(clock.times)


def test_a_batch_is_padded_on_the_left_so_that_each_row_gets_its_own_answer(llama: LlamaForCausalLM) -> None:
    batch = make_batch([[5, 6, 7, 8], [9]], pad=0, side="left")
    tokens = decode_with_transformers(
        llama, asdict(batch), {"max_new_tokens": 5}, device=torch.device("cpu"), clock=Clock()
    )
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [0, 0, 0, 1]]
    assert tokens[0].tolist() == reference(llama, [5, 6, 7, 8], max_new_tokens=5)
    assert tokens[1].tolist() == reference(llama, [9], max_new_tokens=5)


def test_the_plain_loop_agrees_with_transformers(llama: LlamaForCausalLM) -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 1]])
    tokens = decode_plainly(Bare(llama), ids, {"max_new_tokens": 6}, clock=Clock())
    assert tokens[0].tolist() == reference(llama, [5, 6, 7], max_new_tokens=6, do_sample=False)
    assert tokens[1].tolist() == reference(llama, [8, 9, 1], max_new_tokens=6, do_sample=False)
    assert has_generate(llama)
    assert not has_generate(Bare(llama))


def test_the_plain_loop_samples_what_transformers_samples(llama: LlamaForCausalLM) -> None:
    options = {"max_new_tokens": 8, "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}
    torch.manual_seed(3)
    expected = reference(llama, [5, 6, 7], **options)
    torch.manual_seed(3)
    tokens = decode_plainly(Bare(llama), torch.tensor([[5, 6, 7]]), options, clock=Clock())
    assert tokens[0].tolist() == expected


def test_the_plain_loop_stops_when_every_row_has_ended(llama: LlamaForCausalLM) -> None:
    first, second = reference(llama, [5, 6, 7], max_new_tokens=2, do_sample=False)
    clock = Clock()
    ends = {"max_new_tokens": 6, "eos_token_id": [second, WORDS + 1]}
    tokens = decode_plainly(Bare(llama), torch.tensor([[5, 6, 7]]), ends, clock=clock)
    assert tokens[0].tolist() == [first, second]
    assert len(clock.times) == 2


def test_the_clock_tells_prefill_from_decoding() -> None:
    events: list[str] = []
    clock = Clock(tick=lambda: events.append("tick"), first=lambda: events.append("first"))
    clock.see = lambda new: events.append(str(new.shape[1]))
    for count in (1, 2):
        clock.token(torch.ones(3, count))
    assert events == ["first", "tick", "1", "tick", "2"]


def test_tokens_that_were_guessed_come_together() -> None:
    clock = Clock()
    for count in (2, 3, 7, 8):
        clock.token(torch.ones(1, count))
    assert len(clock.times) == 7, "what the first forward gave is the prefill's, as one"
    assert len(set(clock.times[2:6])) == 1


def test_the_clock_sees_the_new_tokens_as_they_come(llama: LlamaForCausalLM) -> None:
    batch, seen = make_batch([[5, 6, 7]], pad=0, side="left"), list[list[int]]()
    clock = Clock(see=lambda new: seen.append(new[0].tolist()))
    options = {"max_new_tokens": 3, "do_sample": False}
    tokens = decode_with_transformers(llama, asdict(batch), options, device=torch.device("cpu"), clock=clock)[
        0
    ].tolist()
    assert seen == [tokens[:1], tokens[:2], tokens[:3]]
    seen.clear()
    decode_plainly(Bare(llama), batch.input_ids, options, clock=clock)
    assert seen == [tokens[:1], tokens[:2], tokens[:3]]


LOGITS = torch.zeros(1, 2, 3)


@pytest.mark.parametrize("output", [LOGITS, (LOGITS, None), {"logits": LOGITS}, CausalLMOutput(logits=LOGITS)])
def test_logits_are_found_in_what_models_return(output: object) -> None:
    assert logits_of(output) is LOGITS


@pytest.mark.parametrize("output", [torch.zeros(2, 3), None, {"scores": LOGITS}, ()])
def test_what_holds_no_logits_is_refused(output: object) -> None:
    with pytest.raises(ConfigError, match="needs logits of shape"):
        logits_of(output)


def test_greedy_takes_the_likeliest() -> None:
    assert choose(torch.tensor([[0.0, 2.0, 1.0]]), torch.zeros(1, 1), {}).tolist() == [1]


def test_padding_after_the_end_is_trimmed() -> None:
    assert trim([4, 2, 0, 0], [2]) == [4, 2]
    assert trim([4, 5], [2]) == [4, 5]
    assert trim([], [2]) == []
    assert trim([4, 5, FILLED, FILLED], [2]) == [4, 5]


def test_end_tokens_come_from_the_first_that_names_any() -> None:
    assert end_tokens({"eos_token_id": 3}, None) == [3]
    assert end_tokens({}, None, type("C", (), {"eos_token_id": [1, 2]})()) == [1, 2]
    assert end_tokens({}, None) == []
