import json
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offstage.pipeline.errors import CheckpointError, ConfigError
from offstage.pipeline.typed_config import type_faults
from offstage.stages.checkpoints.generation_defaults import read_generation_config
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.tokenizers import load_tokenizer
from offstage.stages.generate.options import check_options, check_own_options, check_served, plain_options
from offstage.stages.generate.prompts import Encoder, check_encoded
from offstage.stages.generate.stage import GenerateConfig
from offstage.stages.inputs.generate_options import read_generate
from offstage.stages.inputs.prompts import Prompt, check_prompts, read_prompts


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"prompts": []}, "generate.prompts: [] is no list of prompts"),
        ({"prompts": ""}, "generate.prompts: '' is no list"),
        (
            {"prompts": [{"prompt": "a", "token_ids": [1]}]},
            "generate.prompts[0]: {'prompt': 'a', 'token_ids': [1]} has 2",
        ),
        ({"prompts": [{"promt": "a"}]}, "did you mean 'prompt'"),
        (
            {"prompts": [{"messages": [{"role": "user"}]}]},
            "generate.prompts[0].messages: [{'role': 'user'}] is no list",
        ),
        ({"prompts": [{"prompt": "a", "batch_size": 3}]}, "generate.prompts[0]: 'batch_size' is the same for all"),
        ({"prompts": ["a"], "system": ""}, "generate.system: '' is no text; give what"),
        ({"prompts": ["ok", ""]}, "generate.prompts[1]: '' is empty"),
        ({"prompts": [[1, "2"]]}, "generate.prompts[0]: [1, '2'] is neither"),
        ({"prompts": [[-1]]}, "generate.prompts[0]: [-1] is neither"),
        ({"prompts": [[]]}, "generate.prompts[0]: [] is empty"),
        ({"prompts": [3]}, "generate.prompts[0]: 3 is neither"),
        ({"prompts_file": "/gone"}, "generate.prompts_file: '/gone' is no file"),
    ],
)
def test_bad_prompts_are_named(node: dict, words: str) -> None:
    assert any(words in str(fault) for fault in check_prompts(read_generate(node)))


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("chat", "maybe", "'maybe' is neither true, false nor auto; the default is 'auto'"),
        ("exact", "yes", "'yes' is neither true nor false; the default is False"),
        ("output_logprobs", 1, "1 is neither true nor false; the default is False"),
        ("system", 3, "3 is no text or null; the default is None"),
        ("speculation", "exakt", "'exakt' is none of exact, batched (did you mean 'exact'?); the default is 'exact'"),
        ("assistant_model", 3, "3 is no text or null; the default is None"),
    ],
)
def test_keys_of_other_types_are_named_with_what_may_stand_there(key: str, value: object, rule: str) -> None:
    (fault,) = type_faults(GenerateConfig, {"generate": {"prompts": ["a"], "num_beams": "many", key: value}})
    assert str(fault) == f"generate.{key}: {rule}"


def test_good_prompts_pass() -> None:
    nulls = dict.fromkeys(("batch_size", "chat", "exact", "speculation", "system"))
    assert list(type_faults(GenerateConfig, {"generate": nulls})) == []
    assert list(check_prompts(read_generate({"prompts": ["a", [5, 6]], **nulls}))) == []


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
        ({"watermarking_config": "x"}, "generate: transformers refuses these options: 'str' object has no attribute"),
        (
            {"suppress_tokens": torch.tensor([1])},
            "generate.suppress_tokens: a value of type Tensor stands in no record",
        ),
        ({"sequence_bias": {"a": [b"x"]}}, "generate.sequence_bias.a[0]: b'x' are bytes, which no record holds"),
    ],
)
def test_bad_options_are_named(options: dict, words: str) -> None:
    text = "\n".join(str(fault) for fault in check_options(read_generate({"prompts": ["a"], **options})))
    assert words in text


def test_options_that_change_nothing_pass(tmp_path: Path) -> None:
    unused = {"do_sample": True, "top_k": 0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "no_repeat_ngram_size": 0}
    asked = read_generate(
        {"prompts": ["a", {"prompt": "b", **unused}, {"prompt": "c", "temperature": 0.0, "do_sample": False}]}
    )
    assert list(check_own_options(read_prompts(asked), asked, {"kind": "pretrained", "path": str(tmp_path)})) == []


def test_known_options_pass() -> None:
    node = {"prompts": ["a"], "num_beams": 2, "repetition_penalty": 1.1, "temperature": None, "eos_token_id": [1, 2]}
    assert list(check_options(read_generate(node))) == []


def test_a_prompts_file_has_one_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("first one\n\nsecond: ä\n", encoding="utf-8")
    read = read_prompts(read_generate({"prompts_file": str(file)}))
    assert read == {
        "generate.prompts_file line 1": Prompt("first one"),
        "generate.prompts_file line 3": Prompt("second: ä"),
    }
    file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(read_generate({"prompts_file": str(file)}))
    file.write_bytes(b"good\n\xff\xfe\n")
    with pytest.raises(ConfigError, match=r"line 2: .* isn't UTF-8"):
        read_prompts(read_generate({"prompts_file": str(file)}))


@pytest.mark.parametrize(
    ("lines", "contents"),
    [
        (["Once upon", "", '{"not": "json"}'], ["Once upon", '{"not": "json"}']),
        (['"Well," she said.', "[1]"], ['"Well," she said.', "[1]"]),
        (["", ' {"token_ids": [5]}', '"text"', "[6]"], [[5], "text", [6]]),
        (['"one"', '"two"'], ["one", "two"]),
    ],
)
def test_what_standard_input_held_is_json_where_its_first_line_is(lines: list[str], contents: list) -> None:
    read = read_prompts(read_generate({"prompts_file": "-", "prompts": lines}))
    assert [prompt.content for prompt in read.values()] == contents


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "generate.prompts_file: standard input holds no prompt"),
        (["", "  "], "standard input holds no prompt"),
        (["good", "\udcff"], "generate.prompts_file line 2: standard input isn't UTF-8 there, from its character 1"),
        (["[1]", "not json"], "generate.prompts_file line 2: 'not json' is no JSON"),
        ("no list", "standard input holds no prompt"),
    ],
)
def test_standard_input_without_prompts_is_refused_by_its_line(lines: object, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_prompts(read_generate({"prompts_file": "-", "prompts": lines}))
    assert words in str(error.value)


def test_a_file_of_json_lines_has_texts_token_ids_and_chats_with_options_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "Hi"}]
    lines = [{"prompt": "a", "max_new_tokens": 3}, {"token_ids": [5, 6]}, {"messages": chat, "seed": 4}, "b", [7]]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert list(read_prompts(read_generate({"prompts_file": str(file)})).values()) == [
        Prompt("a", {"max_new_tokens": 3}), Prompt([5, 6]), Prompt(chat, {"seed": 4}), Prompt("b"), Prompt([7])
    ]  # fmt: skip
    file.write_text('{"prompt": "a"}\n{"prompt": "b"\n')
    with pytest.raises(ConfigError, match=r"prompts_file line 2: .* is no JSON"):
        read_prompts(read_generate({"prompts_file": str(file)}))


@pytest.mark.parametrize("depth", [60, 400, 100_000])
def test_an_option_nested_deeper_than_any_is_refused_by_its_line(depth: int, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "stop_strings": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(ConfigError, match=r"prompts_file line 1: .* is no JSON \(nested more than 50 deep\)"):
        read_prompts(read_generate({"prompts_file": str(file)}))


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"max_tokens": 3}, "generate.prompts[1].max_tokens: no such option"),
        ({"max_new_tokens": 0}, "generate.prompts[1].max_new_tokens: 0 is no number of tokens"),
        ({"seed": -1}, "generate.prompts[1].seed: -1 is no seed"),
        (
            {"do_sample": True, "top_p": 1.5},
            "generate.prompts[1].top_p: 1.5 is refused by transformers: ValueError: `top_p`",
        ),
        ({"do_sample": True, "temperature": 0.0}, "generate.prompts[1].temperature: 0.0 is refused"),
        ({"do_sample": True, "top_k": -4}, "generate.prompts[1].top_k: -4 is refused"),
        ({"repetition_penalty": -1.0}, "generate.prompts[1].repetition_penalty: -1.0 is refused"),
    ],
)
def test_a_prompts_own_options_are_checked_under_its_name(own: dict, words: str, tmp_path: Path) -> None:
    model = {"kind": "pretrained", "path": str(tmp_path)}
    asked = read_generate({"prompts": ["a", {"prompt": "b", **own}]})
    (fault,) = check_own_options(read_prompts(asked), asked, model)
    assert str(fault).startswith(words)


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<me>{% endif %}"
)


@pytest.fixture(scope="module")
def chatting() -> PreTrainedTokenizerFast:
    words = {"?": 0, "<user>": 1, "<system>": 2, "<me>": 3, "Hi": 4, "Be": 5}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("<[a-z]+>"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", chat_template=TEMPLATE)


def test_text_is_what_a_user_says_where_the_tokenizer_has_a_template(chatting: PreTrainedTokenizerFast) -> None:
    chat = Prompt([{"role": "user", "content": "Hi"}])
    assert Encoder(chatting).encode("here", Prompt("Hi")) == [1, 4, 3] == Encoder(chatting).encode("here", chat)
    assert Encoder(chatting, chat=False).encode("here", Prompt("Hi")) == [4]
    assert Encoder(chatting, system="Be").encode("here", Prompt("Hi")) == [2, 5, 1, 4, 3]


def test_a_chat_without_a_template_says_what_to_do(chatting: PreTrainedTokenizerFast) -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=chatting.backend_tokenizer, unk_token="?")
    chat = Prompt([{"role": "user", "content": "x"}])
    assert Encoder(plain).encode("here", Prompt("Hi")) == [4]
    for encoder, prompt in ((Encoder(plain, chat=True), Prompt("Hi")), (Encoder(plain), chat)):
        with pytest.raises(ConfigError, match=r"generate\.chat: the tokenizer has no template"):
            encoder.encode("here", prompt)


def test_a_prompt_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_text('{"max_position_embeddings": 4}')
    asked = read_generate({"prompts": [[1] * 4, [1] * 5]})
    (fault,) = check_encoded(read_prompts(asked), asked, {"path": str(tmp_path)})
    assert str(fault).startswith("generate.prompts[1]: 5 tokens are more than the model's context of 4")


def test_text_without_a_tokenizer_says_what_to_give(tmp_path: Path) -> None:
    assert load_tokenizer(ModelSource(str(tmp_path))) is None
    assert Encoder(None).encode("here", Prompt([5, 6])) == [5, 6]
    with pytest.raises(ConfigError, match=r"here: 'hello' is text.*generate\.prompts=\[\[5,6,7\]\]"):
        Encoder(None).encode("here", Prompt("hello"))
    with pytest.raises(ConfigError, match=r"model\.tokenizer: .* holds no tokenizer that loads"):
        load_tokenizer(ModelSource("/x", tokenizer=str(tmp_path)))


@pytest.mark.parametrize(
    "value", ["[[1]]", "1.5", "true", "1e30", "NaN", "1000000000000000000000000000000", '{"a": 1}']
)
@pytest.mark.parametrize("name", ["eos_token_id", "pad_token_id", "decoder_start_token_id"])
def test_defaults_that_name_no_token_are_refused_by_file_and_name(name: str, value: str, tmp_path: Path) -> None:
    tmp_path.joinpath("generation_config.json").write_text(f'{{"{name}": {value}}}')
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: .*{name}|generation_config\.json: TypeError"):
        read_generation_config(tmp_path)


def test_the_plain_loop_refuses_options_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generate\.num_beams: .* max_new_tokens, do_sample"):
        plain_options({"num_beams": 2, "max_new_tokens": 3}, None)
    tmp_path.joinpath("generation_config.json").write_text('{"eos_token_id": 7, "temperature": 0.5, "do_sample": true}')
    defaults = read_generation_config(tmp_path)
    options = plain_options({"max_new_tokens": 3, "do_sample": False}, defaults)
    assert (options["eos_token_id"], options["do_sample"], options["max_new_tokens"]) == (7, False, 3)
    assert read_generation_config(tmp_path / "elsewhere") is None


@pytest.mark.parametrize(
    ("architecture", "asked", "words"),
    [
        ("WhisperForConditionalGeneration", {"output_logprobs": True}, "generate.output_logprobs: True isn't served"),
        ("MambaForCausalLM", {"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens: 2 asks to take tokens back"),
        ("LlamaForCausalLM", {"output_logprobs": True, "prompt_lookup_num_tokens": 2}, ""),
    ],
)
def test_what_an_architecture_does_not_do_is_refused_by_its_option(
    tmp_path: Path, architecture: str, asked: dict, words: str
) -> None:
    tmp_path.joinpath("config.json").write_text(json.dumps({"architectures": [architecture]}))
    faults = [
        str(fault)
        for fault in check_served(read_generate({"prompts": ["a"], **asked}), {"kind": "pretrained", "path": tmp_path})
    ]
    assert [words in fault for fault in faults] == ([True] if words else [])
