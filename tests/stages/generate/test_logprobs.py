"""The log-probabilities of the chosen tokens, against those of transformers' own ``generate`` with its logits kept."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from offstage.stages.generate.decode import Clock, decode_plainly, decode_with_transformers, trim
from offstage.stages.generate.logprobs import ChosenLogprobs
from offstage.stages.inference.padding import Batch, make_batch

WORDS, END = 50, 7
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=WORDS)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    return model


@pytest.fixture(scope="module")
def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**shape, vocab_size=WORDS, decoder_start_token_id=0)).eval()


def expected(model: Any, batch: Batch, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the new tokens and their log-probabilities, as transformers works them out from the raw logits."""
    torch.manual_seed(3)
    kept = {"output_logits": True, "output_scores": True, "return_dict_in_generate": True}
    out = model.generate(batch.input_ids, attention_mask=batch.attention_mask, **options, **kept)
    beams = {"beam_indices": out.beam_indices} if "beam_indices" in out else {}
    scores = model.compute_transition_scores(out.sequences, out.logits, **beams, normalize_logits=True)
    return out.sequences[:, -scores.shape[1] :], scores


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalised": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "sampled": {"do_sample": True, "temperature": 0.3, "top_k": 9, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "a static cache": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_they_are_those_of_the_raw_logits_whatever_chose_the_tokens(
    kind: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    batch = make_batch([[5, 6, 9, 3], [8, 9], [11, 12, 5]], pad=0, side="left" if kind == "llama" else "right")
    asked = {"max_new_tokens": 9, "eos_token_id": END, "pad_token_id": 0, **options}
    new, scores = expected(model, batch, asked)
    torch.manual_seed(3)
    logprobs = ChosenLogprobs()
    tokens = decode_with_transformers(model, asdict(batch), asked, device=CPU, clock=Clock(), logprobs=logprobs)
    assert tokens.tolist() == new.tolist()
    for place, row in enumerate(tokens.tolist()):
        count = len(trim(row, [END]))
        assert logprobs.of(place, count) == pytest.approx(scores[place, :count].tolist(), abs=1e-6)
        assert max(logprobs.of(place, count)) <= 0
    assert not model._forward_hooks


def test_those_of_guessed_tokens_are_those_of_the_same_tokens_one_by_one(llama: LlamaForCausalLM) -> None:
    batch, logprobs = make_batch([[5, 6, 5, 6, 5, 6]], pad=0, side="left"), ChosenLogprobs()
    new, scores = expected(llama, batch, {"max_new_tokens": 8})
    options = {"max_new_tokens": 8, "prompt_lookup_num_tokens": 3}
    tokens = decode_with_transformers(llama, asdict(batch), options, device=CPU, clock=Clock(), logprobs=logprobs)
    assert tokens.tolist() == new.tolist()
    assert logprobs.of(0, 8) == pytest.approx(scores[0].tolist(), abs=1e-4)


def test_the_plain_loop_has_them_too(llama: LlamaForCausalLM) -> None:
    class Bare(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return llama(input_ids=tokens).logits

    ids, logprobs = torch.tensor([[5, 6, 7], [8, 9, 1]]), ChosenLogprobs()
    decode_plainly(Bare(), ids, {"max_new_tokens": 5}, clock=Clock(), logprobs=logprobs)
    for row in range(2):
        _, scores = expected(llama, make_batch([ids[row].tolist()], pad=0, side="left"), {"max_new_tokens": 5})
        assert logprobs.of(row, 5) == pytest.approx(scores[0].tolist(), abs=1e-4)


def test_a_word_that_is_impossible_has_none() -> None:
    logprobs = ChosenLogprobs()
    logprobs.note(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]), torch.tensor([1, 1]))
    assert logprobs.of(0, 1) == [None]
    assert logprobs.of(1, 1) == pytest.approx([-0.6931472])
