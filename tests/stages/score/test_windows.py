"""What is scored after what: windows of long texts, continuations after their contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from transformers import AutoTokenizer

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.typed_config import type_faults
from offstage.stages.inputs.texts import ScoredText, ScoreOptions, check_texts, read_scored_texts
from offstage.stages.score.stage import ScoreConfig
from offstage.stages.score.windows import EncodedText, check_encoded_texts, cut, encode

TINY = Path(__file__).parents[3] / "conf" / "checkpoints" / "tiny"


def guide(length: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """Return beginning, end and scored tokens of each window, as Hugging Face's guide to perplexity goes through."""
    windows, done = [], 0
    for begin in range(0, length, stride):
        end = min(begin + window, length)
        labels = [False] * (end - begin)
        for place in range(end - done):
            labels[-1 - place] = True
        if count := sum(labels[1:]):  # a label is held against the logits before it
            windows.append((begin, end, count))
        done = end
        if end == length:
            break
    return windows


@settings(deadline=None, max_examples=200)
@given(st.integers(2, 60), st.integers(2, 20), st.data())
def test_windows_are_those_of_the_guide_to_perplexity(length: int, window: int, data: Any) -> None:
    stride = data.draw(st.integers(1, window))
    windows = list(cut([EncodedText(range(length), 1)], window=window, stride=stride))
    assert [(one.begin, one.end, len(one.scored)) for one in windows] == guide(length, window, stride)
    scored = [token for one in windows for token in one.scored]
    assert scored == sorted(set(scored)), "no token twice"
    if stride < window:
        assert scored == list(range(1, length)), "each token but the first"


def test_only_the_continuation_is_scored_and_windows_count_on_from_text_to_text() -> None:
    windows = list(cut([EncodedText(range(6), 4), EncodedText(range(3), 1)], window=9, stride=9))
    assert [(one.index, one.text, list(one.scored)) for one in windows] == [(0, 0, [4, 5]), (1, 1, [1, 2])]


def test_what_an_encoder_reads_is_in_one_window_and_all_after_it_is_scored() -> None:
    (one,) = cut([EncodedText([5, 6, 7], 0, source=[1, 2], is_whole=True)], window=2, stride=2)
    assert (list(one.scored), list(one.source)) == ([5, 6, 7], [1, 2])


def test_the_last_token_of_a_continuation_needs_no_room_to_be_foretold() -> None:
    pair = EncodedText(range(9), 4, is_whole=True)
    (seen,) = cut([pair], window=9, stride=9)
    (one,) = cut([pair], window=8, stride=8)
    assert list(seen.seen) == list(range(9))
    assert (list(one.seen), list(one.scored)) == (list(range(8)), [4, 5, 6, 7, 8])


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


def test_a_text_begins_with_the_tokens_that_its_tokenizer_puts_there(tokenizer: Any) -> None:
    ids = tokenizer("One text")["input_ids"]
    assert encode("here", ScoredText("One text"), tokenizer, has_encoder=False) == EncodedText(ids, 1)
    given = encode("here", ScoredText([5, 6], [7, 8, 9]), None, has_encoder=False)
    assert given == EncodedText([7, 8, 9, 5, 6], 3, is_whole=True)


@pytest.mark.parametrize(("context", "continuation"), [("The weights", " of a model"), ("The weights ", "of a model")])
def test_a_pair_is_made_tokens_in_one_and_space_before_a_word_is_its_own(
    tokenizer: Any, context: str, continuation: str
) -> None:
    both = tokenizer("The weights of a model")["input_ids"]
    encoded = encode("here", ScoredText(continuation, context), tokenizer, has_encoder=False)
    assert list(encoded.ids) == both
    assert tokenizer.decode(both[encoded.first :]) == " of a model"


def test_an_encoder_reads_the_context_and_the_continuation_has_no_special_tokens(tokenizer: Any) -> None:
    encoded = encode("here", ScoredText("of a model", "The weights"), tokenizer, has_encoder=True)
    assert list(encoded.source) == tokenizer("The weights")["input_ids"]
    assert list(encoded.ids) == tokenizer("of a model", add_special_tokens=False)["input_ids"]
    assert encoded.first == 0


@pytest.mark.parametrize(
    ("text", "has_encoder", "words"),
    [
        (ScoredText([5]), False, "one token, and nothing is before it"),
        (ScoredText("plain"), True, "a mapping of context and continuation"),
        (ScoredText("\u0301", "e"), False, ""),
    ],
)
def test_what_has_nothing_to_score_is_refused(tokenizer: Any, text: ScoredText, has_encoder: bool, words: str) -> None:
    if words:
        with pytest.raises(ConfigError, match=words):
            encode("here", text, tokenizer, has_encoder=has_encoder)
    else:
        assert encode("here", text, tokenizer, has_encoder=has_encoder).first >= 1


def test_text_without_a_tokenizer_says_what_to_give() -> None:
    with pytest.raises(ConfigError, match=r"here: 'hello' is text.*score\.texts=\[\[5,6,7\]\]"):
        encode("here", ScoredText("hello"), None, has_encoder=False)


BAD = [
    ({"texts": []}, "score.texts: [] holds no text"),
    ({"texts": [""]}, "score.texts[0]: '' is empty"),
    ({"texts": ["a", "  "]}, "score.texts[1]: '  ' is empty"),
    ({"texts": [[]]}, "score.texts[0]: [] is empty"),
    ({"texts": [3]}, "score.texts[0]: 3 is neither text"),
    ({"texts": [[5, -1]]}, "score.texts[0]: [5, -1] is neither text"),
    ({"texts": ["a\udcff"]}, "is neither text in UTF-8"),
    ({"texts": [{"context": "a", "continuation": ""}]}, "score.texts[0].continuation: '' is empty"),
    ({"texts": [{"context": "a"}]}, "'continuation' is missing"),
    ({"texts": [{"context": "a", "continuation": "b", "contxt": "c"}]}, "'contxt' isn't known (did you mean 'context'"),
    ({"texts": [{"context": "a", "continuation": [5]}]}, "are text and token ids; give two of a kind"),
    ({"texts": ["a"], "window": 8, "stride": 9}, "score.stride: 9 tokens are more than a window of 8"),
    ({"text_file": "/none"}, "score.text_file: '/none' is no file"),
    ({"texts_file": "/none"}, "score.texts_file: '/none' is no file"),
]


@pytest.mark.parametrize(("keys", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_texts_and_windows_are_told_before_the_model_is_known(keys: dict[str, Any], words: str) -> None:
    (fault,) = check_texts(ScoreOptions(**keys))
    assert words in str(fault)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("window", 1, "1 is no whole number from 2 or null; the default is None"),
        ("stride", 0, "0 is no whole number from 1 or null; the default is None"),
        ("batch_size", 0, "0 is neither a whole number from 1 nor auto; the default is 1"),
        ("batch_size", "atuo", "'atuo' is neither a whole number from 1 nor auto (did you mean 'auto'?)"),
    ],
)
def test_numbers_that_are_none_are_told_with_what_may_stand_there(key: str, value: object, rule: str) -> None:
    (fault,) = type_faults(ScoreConfig, {"score": {key: value}})
    assert str(fault).startswith(f"score.{key}: {rule}")


@pytest.mark.parametrize(("content", "words"), [(b"\xff", "isn't UTF-8 from its byte 1 on"), (b" \n", "holds no text")])
def test_a_file_that_is_no_text_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    tmp_path.joinpath("text").write_bytes(content)
    (fault,) = check_texts(ScoreOptions(text_file=str(tmp_path / "text")))
    assert words in str(fault)


def test_a_file_of_lines_holds_texts_ids_and_pairs(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('"one"\n\n[5, 6]\n{"context": "a", "continuation": "b"}\n')
    assert read_scored_texts(ScoreOptions(texts_file=str(file))) == {
        "score.texts_file line 1": ScoredText("one"),
        "score.texts_file line 3": ScoredText([5, 6]),
        "score.texts_file line 4": ScoredText("b", "a"),
    }


UNFIT = [
    ({"texts": [[5, 6, 7]], "window": 9}, "score.window: 9 tokens are more than the model's context of 8"),
    ({"texts": [[5, 6, 7]], "stride": 9}, "score.stride: 9 tokens are more than a window of 8"),
    ({"texts": [[5, 90]]}, "score.texts[0]: token id 90 is beyond the model's 90 words"),
    (
        {"texts": [{"context": [1] * 7, "continuation": [2, 3, 4]}]},
        "score.texts[0]: context and continuation have 10 tokens, more than the 9 of a window of 8",
    ),
    ({"texts": ["hello"]}, "is text and the checkpoint has no tokenizer"),
]


@pytest.mark.parametrize(("keys", "words"), UNFIT, ids=[words for _, words in UNFIT])
def test_what_does_not_fit_the_model_is_told_before_its_weights_are_read(
    keys: dict[str, Any], words: str, tmp_path: Path
) -> None:
    tmp_path.joinpath("config.json").write_text('{"max_position_embeddings": 8, "vocab_size": 90}')
    (fault,) = check_encoded_texts(ScoreOptions(**keys), {"path": str(tmp_path)}, has_encoder=False)
    assert words in str(fault)
