from pathlib import Path

import pytest

from pipeline.errors import CheckpointError, ConfigError
from stages.checkpoints.tokenizers import load_tokenizer
from stages.generate.options import check_options, checkpoint_defaults, plain_options
from stages.generate.prompts import check_prompts, encode, make_batch, read_prompts


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"prompts": []}, "generate.prompts: [] is no list of prompts"),
        ({"prompts": "text"}, "generate.prompts: 'text' is no list"),
        ({"prompts": ["ok", ""]}, "generate.prompts[1]: '' is neither"),
        ({"prompts": [[1, "2"]]}, "generate.prompts[0]: [1, '2'] is neither"),
        ({"prompts": [[-1]]}, "generate.prompts[0]: [-1] is neither"),
        ({"prompts": [[]]}, "generate.prompts[0]: [] is neither"),
        ({"prompts": [3]}, "generate.prompts[0]: 3 is neither"),
        ({"prompts": ["a"], "batch_size": 0}, "generate.batch_size: 0"),
        ({"prompts": ["a"], "batch_size": True}, "generate.batch_size: True"),
        ({"prompts_file": "/gone"}, "generate.prompts_file: '/gone' is no file"),
    ],
)
def test_bad_prompts_are_named(node: dict, words: str) -> None:
    assert any(words in str(fault) for fault in check_prompts(node))


def test_good_prompts_pass() -> None:
    assert list(check_prompts({"prompts": ["a", [5, 6]], "batch_size": None})) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 3}, "generate.max_tokens: no such option"),
        ({"num_beam": 2}, "did you mean 'num_beams'"),
        ({"prompt": ["x"]}, "did you mean 'prompts'"),
        ({"max_new_tokens": 0}, "generate.max_new_tokens: 0"),
        ({"max_new_tokens": "many"}, "generate.max_new_tokens: 'many'"),
        ({"pad_token_id": "<pad>"}, "generate.pad_token_id: '<pad>' is no token id"),
        ({"eos_token_id": 1.5}, "generate.eos_token_id: 1.5 is no token id"),
        ({"eos_token_id": [1, True]}, "generate.eos_token_id: [1, True] is no token id"),
        ({"eos_token_id": 2**63}, "is no token id"),
        ({"cache_implementation": "nonsense"}, "generate: transformers refuses these options"),
    ],
)
def test_bad_options_are_named(options: dict, words: str) -> None:
    text = "\n".join(str(fault) for fault in check_options({"prompts": ["a"], **options}))
    assert words in text


def test_known_options_pass() -> None:
    node = {"prompts": ["a"], "num_beams": 2, "repetition_penalty": 1.1, "temperature": None, "eos_token_id": [1, 2]}
    assert list(check_options(node)) == []


def test_a_prompts_file_has_one_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("first one\n\nsecond: ä\n", encoding="utf-8")
    assert read_prompts({"prompts_file": str(file)}) == ["first one", "second: ä"]
    file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts({"prompts_file": str(file)})
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_prompts({"prompts_file": str(file)})


def test_text_without_a_tokenizer_says_what_to_give(tmp_path: Path) -> None:
    assert load_tokenizer({"path": str(tmp_path)}) is None
    assert encode([[5, 6]], None) == [[5, 6]]
    with pytest.raises(ConfigError, match=r"'hello' is text.*generate\.prompts=\[\[5,6,7\]\]"):
        encode(["hello"], None)
    with pytest.raises(ConfigError, match=r"model\.tokenizer: .* holds no tokenizer that loads"):
        load_tokenizer({"path": "/x", "tokenizer": str(tmp_path)})


def test_batches_pad_on_the_side_they_are_asked_to() -> None:
    left, right = (make_batch([[1, 2, 3], [4]], pad=9, side=side) for side in ("left", "right"))
    assert left.input_ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert right.input_ids.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert right.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    "value", ["[[1]]", "1.5", "true", "1e30", "NaN", "1000000000000000000000000000000", '{"a": 1}']
)
@pytest.mark.parametrize("name", ["eos_token_id", "pad_token_id", "decoder_start_token_id"])
def test_defaults_that_name_no_token_are_refused_by_file_and_name(name: str, value: str, tmp_path: Path) -> None:
    tmp_path.joinpath("generation_config.json").write_text(f'{{"{name}": {value}}}')
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: .*{name}|generation_config\.json: TypeError"):
        checkpoint_defaults(tmp_path)


def test_the_plain_loop_refuses_options_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generate\.num_beams: .* max_new_tokens, do_sample"):
        plain_options({"num_beams": 2, "max_new_tokens": 3}, None)
    tmp_path.joinpath("generation_config.json").write_text('{"eos_token_id": 7, "temperature": 0.5, "do_sample": true}')
    defaults = checkpoint_defaults(tmp_path)
    options = plain_options({"max_new_tokens": 3, "do_sample": False}, defaults)
    assert (options["eos_token_id"], options["do_sample"], options["max_new_tokens"]) == (7, False, 3)
    assert checkpoint_defaults(tmp_path / "elsewhere") is None
