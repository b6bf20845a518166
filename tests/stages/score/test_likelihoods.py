"""Scores held against transformers' own: the log-softmax of its logits, bit for bit, and its loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    T5Config,
)

from offstage.pipeline.errors import ConfigError
from offstage.stages.inputs.batches import by_length
from offstage.stages.plan.request.requests import NORMALISED
from offstage.stages.score.likelihoods import TokenScores, require_causal, score_windows
from offstage.stages.score.metrics import TextScore
from offstage.stages.score.windows import EncodedText, Window, cut

WORDS = 97
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CAUSAL: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, vocab_size=WORDS, num_key_value_heads=2),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=WORDS),
    "qwen2": Qwen2Config(**SIZES, vocab_size=WORDS, num_key_value_heads=2),
    "mixtral": MixtralConfig(**SIZES, vocab_size=WORDS, num_key_value_heads=2, num_local_experts=4),
    "mamba": MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=4, vocab_size=WORDS),
}
HALVES: dict[str, PretrainedConfig] = {
    "t5": T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=WORDS, decoder_start_token_id=0),
    "bart": BartConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=WORDS,
    ),
}  # fmt: skip
CPU = torch.device("cpu")


def made(config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """Return a model with random weights, large enough that likelihoods differ."""
    torch.manual_seed(7)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(config, dtype=dtype).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def tokens(length: int, seed: int = 3) -> list[int]:
    return torch.randint(3, WORDS, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def windows_of(length: int, *, window: int, stride: int, first: int = 1) -> list[Window]:
    return list(cut([EncodedText(tokens(length), first)], window=window, stride=stride))


def labels(window: Window) -> torch.Tensor:
    """Return the window's ids with -100 where nothing is scored, as the guide to perplexity has them."""
    masked = torch.tensor([window.ids])
    masked[:, : window.first - window.begin] = -100
    return masked


def plainly(model: Any, window: Window) -> tuple[list[float], list[bool], torch.Tensor]:
    """Return log-likelihoods, greediness and loss of a window, all of it at once, by transformers' plain call."""
    with torch.no_grad():
        if window.source:
            target = torch.tensor([window.ids])
            out, shift = model(input_ids=torch.tensor([window.source]), labels=target), 0
        else:
            out, shift = model(torch.tensor([window.ids]), labels=labels(window)), 1
    place = torch.arange(window.first - window.begin, window.end - window.begin)
    rows, wanted = out.logits[0].float(), torch.tensor(window.ids)[place]
    scores = rows.log_softmax(-1)[place - shift, wanted]
    return scores.tolist(), (rows.argmax(-1)[place - shift] == wanted).tolist(), out.loss


def check(model: Any, windows: Sequence[Window]) -> None:
    """Hold each of ``windows``, alone, against the plain call."""
    for window in windows:
        (scores,) = score_windows(model, [window], CPU)
        values, greedy, loss = plainly(model, window)
        assert scores == TokenScores(values, greedy)
        digits = 2e-6 if loss.dtype == torch.float32 else 2**-8  # the loss of T5 and Bart is of their own dtype
        assert -math.fsum(values) / len(values) == pytest.approx(float(loss), rel=digits)


def test_a_continuation_that_ends_after_the_context_s_last_position_is_scored_by_it() -> None:
    model = made(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=WORDS, n_positions=8), torch.float32)
    pair = EncodedText(tokens(9), 4, is_whole=True)
    (scores,) = score_windows(model, list(cut([pair], window=8, stride=8)), CPU)
    with torch.no_grad():
        rows = model(torch.tensor([pair.ids[:8]])).logits[0].log_softmax(-1)
    assert scores.values == [float(rows[place - 1, pair.ids[place]]) for place in range(4, 9)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", CAUSAL)
def test_they_are_bitwise_those_of_the_plain_model_and_come_to_its_loss(architecture: str, dtype: torch.dtype) -> None:
    model = made(CAUSAL[architecture], dtype)
    check(model, windows_of(200, window=96, stride=40))
    check(model, windows_of(60, window=96, stride=96, first=50))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", HALVES)
def test_a_decoder_beside_an_encoder_scores_every_token_of_the_continuation(
    architecture: str, dtype: torch.dtype
) -> None:
    texts = [EncodedText(tokens(70), 0, tokens(30, 4)), EncodedText(tokens(1), 0, tokens(5, 4))]
    check(made(HALVES[architecture], dtype), list(cut(texts, window=96, stride=96)))


def test_the_perplexity_of_a_long_text_is_that_of_the_guide() -> None:
    model, windows = made(CAUSAL["gpt2"], torch.float32), windows_of(300, window=64, stride=32)
    total, count = 0.0, 0
    with torch.no_grad():
        for window in windows:
            scored = len(window.scored)
            total += float(model(torch.tensor([window.ids]), labels=labels(window)).loss) * scored
            count += scored
    values = [value for window in windows for value in score_windows(model, [window], CPU)[0].values]
    assert count == len(values) == 299
    assert TextScore.of(values, None).perplexity == pytest.approx(math.exp(total / count), rel=1e-6)


@pytest.mark.parametrize("config", [CAUSAL["llama"], CAUSAL["gpt2"], HALVES["t5"]], ids=["llama", "gpt2", "t5"])
def test_padding_on_the_right_changes_the_last_bits_at_most(config: PretrainedConfig) -> None:
    model = made(config, torch.float32)
    source = tokens(9, 5) if config.is_encoder_decoder else []
    texts = [EncodedText(tokens(length), 0 if source else 1, source[:length]) for length in (40, 7, 23)]
    windows = list(cut(texts, window=64, stride=64))
    together = score_windows(model, windows, CPU)
    for window, scores in zip(windows, together, strict=True):
        (alone,) = score_windows(model, [window], CPU)
        assert scores.values == pytest.approx(alone.values, abs=2e-5)
        assert len(scores.greedy) == len(window.scored)


@pytest.mark.parametrize("words", [WORDS, 4096, 50257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_log_softmax_of_some_rows_is_that_of_all(words: int, dtype: torch.dtype) -> None:
    logits = torch.randn(2 * NORMALISED + 5, words, dtype=dtype, generator=torch.Generator().manual_seed(1)) * 9
    whole = logits.float().log_softmax(-1)
    for start in range(0, len(logits), NORMALISED):
        assert torch.equal(
            logits[start : start + NORMALISED].float().log_softmax(-1), whole[start : start + NORMALISED]
        )


def test_a_model_that_sees_what_comes_after_a_token_foretells_nothing() -> None:
    sizes = {**SIZES, "vocab_size": WORDS}
    for config in (BertConfig(**sizes, is_decoder=True), GPTNeoXConfig(**sizes), CAUSAL["llama"], HALVES["t5"]):
        require_causal(made(config, torch.float32), CPU)
    with pytest.raises(ConfigError, match="BertLMHeadModel sees what comes after a token"):
        require_causal(made(BertConfig(**sizes), torch.float32), CPU)


class Bare(torch.nn.Module):
    """A model that isn't transformers': token ids to logits."""

    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        self.fill = fill

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = torch.full((*ids.shape, WORDS), self.fill)
        return torch.scatter(logits, -1, ((ids + 1) % WORDS)[..., None], torch.inf if self.fill else 5.0)


def test_any_model_of_logits_can_be_asked_and_what_is_not_finite_is_null() -> None:
    (window,) = cut([EncodedText([5, 6, 9], 1)], window=9, stride=9)
    (scores,) = score_windows(Bare(), [window], CPU)
    assert scores.greedy == [True, False]
    assert scores.values[0] == pytest.approx(scores.values[1] + 5)
    (scores,) = score_windows(Bare(1.0), [window], CPU)
    assert scores.values == [None, None]


def test_sums_go_over_all_tokens_alike() -> None:
    one, other = TextScore.of([-1.0, -2.0], 4), TextScore.of([-6.0], 2)
    both = TextScore.together([one, other])
    assert (both.tokens, both.total, both.bytes) == (3, -9.0, 6)
    assert both.perplexity == pytest.approx(math.exp(3))
    assert both.bits_per_byte == pytest.approx(9 / math.log(2) / 6)
    assert TextScore.together([one, TextScore.of([-1.0], None)]).bits_per_byte is None
    assert TextScore.together([one, TextScore.of([None], 3)]).perplexity is None
    assert TextScore.of([-1e4], 1).perplexity is None, "beyond all numbers"


def test_batches_are_of_like_length_and_the_longest_come_first() -> None:
    assert by_length([3, 9, 2, 8, 1], size=2) == [[1, 3], [0, 2], [4]]
    assert by_length([3, 2, 3, 2], size=None, padded=False) == [[0, 2], [1, 3]]
    assert by_length([1, 1], size=1) == [[0], [1]]
