from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from offstage.stages.plan.memory_needs import memory_needs
from offstage.stages.plan.request.geometry import Geometry, Request, round_up
from offstage.stages.plan.request.requests import (
    NORMALISED,
    generate_request,
    read_request,
    score_request,
    sized_requests,
)
from tests.stages.plan.skeletons import outline

SMALL = {
    "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize("stages", [None, [], ["empty_init", "plan"], ["plan", "generate"], ["generate", "of_another"]])
def test_the_last_stage_that_runs_the_model_decides_what_is_asked(stages: list[str] | None) -> None:
    config = {"generate": {"prompts": ["one", "two"]}} | ({} if stages is None else {"stages": stages})
    assert read_request(config) == Request(members=2)


def test_a_request_is_rounded_up_and_short_ones_are_alike() -> None:
    assert (
        generate_request({"prompts": ["one"], "max_new_tokens": 5}, {})
        == generate_request({"prompts": ["two"]}, {})
        == Request()
    )
    assert generate_request({"prompts": ["one", "two"]}, {}) == Request(members=2)
    assert generate_request({"prompts": ["one", "two"], "batch_size": 2}, {}) == Request(sequences=2)
    long = generate_request({"prompts": [[1] * 1000], "max_new_tokens": 1000, "num_beams": 3}, {})
    assert long.sequences == 3
    assert 1000 <= long.prompt <= 1000 * 9 / 8
    assert 6000 <= long.tokens <= 6000 * 9 / 8
    assert [round_up(count) for count in (0, 1, 15, 16, 17, 1000)] == [0, 1, 15, 16, 18, 1024]


@pytest.mark.parametrize(
    ("defaults", "own", "expected"),
    [
        ({"num_beams": 4}, {}, Request(4)),
        ({"num_beams": 4}, {"num_beams": None}, Request(4)),
        ({"num_beams": 4}, {"num_beams": 1}, Request(1)),
        ({"num_return_sequences": 3, "do_sample": True}, {}, Request(3)),
        ({"use_cache": False, "max_new_tokens": 100}, {}, Request(1, 104, 0)),
        ({"use_cache": False}, {"use_cache": True}, Request(1)),
        ({"max_length": 512}, {"max_new_tokens": 9}, Request(1)),
        ({"prompt_lookup_num_tokens": 3}, {}, Request(1, positions=4, judged=3)),
        ({}, {"use_cache": False}, Request(1, 64, 0)),
        ({"max_length": 512}, {"max_new_tokens": None}, Request(1, 64, 512)),
        ({"guidance_scale": 1.5}, {}, Request(1, forwards=2)),
        ({"guidance_scale": 1.5, "num_beams": 3}, {}, Request(3, forwards=2)),
        ({"guidance_scale": 1}, {}, Request(1)),
        ({"num_beams": 4}, {"prompts": [{"token_ids": [5, 6], "num_beams": 1}]}, Request(1)),
        ({"num_beams": 4}, {"prompts": [[5], {"token_ids": [6], "num_beams": 1}], "lockstep": 1}, Request(4)),
        ({"max_new_tokens": 9}, {"prompts": [{"token_ids": [5, 6], "max_length": 512}]}, Request(1)),
    ],
)
def test_a_checkpoints_own_generation_config_is_reckoned_with_where_the_run_says_nothing(
    defaults: dict[str, object], own: dict[str, object], expected: Request, tmp_path: Path
) -> None:
    tmp_path.joinpath("generation_config.json").write_text(json.dumps(defaults))
    request = generate_request({"prompts": [[5, 6]], **own}, {"path": str(tmp_path)})
    assert replace(request, copies=1) == expected


def test_where_nobody_says_how_many_tokens_as_many_are_reckoned_with_as_transformers_decodes(tmp_path: Path) -> None:
    longest = {"prompts": [[5] * 100], "max_length": 120}
    assert generate_request({"prompts": [[5] * 100]}, {}).length == round_up(100 + 20)
    assert generate_request(longest, {}).length == round_up(120)
    tmp_path.joinpath("config.json").write_text('{"is_encoder_decoder": true}')
    assert generate_request(longest, {"path": str(tmp_path)}).length == round_up(1 + 120)


def test_without_a_generation_config_what_transformers_takes_from_the_config_is_reckoned_with(tmp_path: Path) -> None:
    said = {"use_cache": False, "num_beams": 4, "guidance_scale": 2.0}
    tmp_path.joinpath("config.json").write_text(json.dumps(said))
    asked = generate_request({"prompts": [[5, 6]]}, {"path": str(tmp_path)})
    assert asked == Request(1, 64, 0, forwards=2)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, **said))
    assert (model.generation_config.num_beams or 1, model.generation_config.use_cache) == (1, False)
    assert model.generation_config.guidance_scale == 2


def test_an_assistant_guesses_as_many_tokens_as_its_own_files_say_where_nothing_is_given(tmp_path: Path) -> None:
    model, assistant = tmp_path / "model", tmp_path / "assistant"
    for folder, guessed in ((model, 7), (assistant, 30)):
        folder.mkdir()
        folder.joinpath("generation_config.json").write_text(json.dumps({"num_assistant_tokens": guessed}))
    asked = {"prompts": [[5, 6]], "assistant_model": str(assistant)}
    node = {"path": str(model)}
    assert generate_request(asked, node).judged == 30
    assert generate_request({**asked, "num_assistant_tokens": 4}, node).judged == 4
    assistant.joinpath("generation_config.json").unlink()
    assert generate_request(asked, node).judged == 20


def test_the_tokens_of_a_long_text_are_counted_by_its_models_tokenizer(tmp_path: Path) -> None:
    tiny = {"path": str(resources.files("offstage.conf") / "checkpoints" / "tiny")}
    text = "weights wait offstage until their cue, " * 40
    counted = len(AutoTokenizer.from_pretrained(tiny["path"])(text)["input_ids"])
    assert generate_request({"prompts": [text]}, tiny).prompt == round_up(counted)
    assert generate_request({"prompts": [text]}, {"path": "x", "tokenizer": tiny["path"]}).prompt == round_up(counted)
    (tmp_path / "tokenizer.json").write_text("{")
    for model in ({"path": str(tmp_path)}, {"path": str(tmp_path / "none")}):
        assert generate_request({"prompts": [text]}, model).prompt == round_up(len(text) // 3 + 1)


def scoring(**score: object) -> dict[str, object]:
    return {"stages": ["plan", "score"], "generate": {"prompts": ["one"] * 9}, "score": score}


def test_scoring_asks_for_the_logits_of_whole_windows_and_no_cache() -> None:
    short = read_request(scoring(texts=["one", [5, 6]]))
    assert short == Request(1, 64, length=0, positions=64, normalised=NORMALISED)
    long = read_request(scoring(texts=[[5] * 1000, [5]], window=128, stride=64, batch_size=4))
    assert (long.sequences, long.prompt, long.positions, long.tokens) == (4, 128, 128, 0)
    assert read_request(scoring(texts=[[5] * 1000], window=128, batch_size=4, exact=True)).sequences == 1
    assert read_request(scoring(texts=[[5] * 1000], window=512, batch_size=64)).sequences == 2, "there are no more"


def test_what_an_encoder_reads_is_no_part_of_the_window_of_logits(tmp_path: Path) -> None:
    pair = {"texts": [{"context": [5] * 500, "continuation": [6] * 100}]}
    assert score_request(pair, {"path": str(tmp_path)}).prompt == round_up(600)
    tmp_path.joinpath("config.json").write_text('{"is_encoder_decoder": true}')
    assert score_request(pair, {"path": str(tmp_path)}).prompt == round_up(500)


def test_a_batch_of_windows_can_be_the_plans_to_choose() -> None:
    config = scoring(texts=[[5] * 1000], window=100, batch_size="auto")
    requests = sized_requests(read_request(config), config)
    assert max(size for size in requests if size) == 10
    assert all(request.sequences == size for size, request in requests.items())


def test_what_is_kept_of_many_tokens_is_counted() -> None:
    few, many = (score_request({"texts": [[5] * count]}, {}).result_bytes for count in (100, 10**5))
    assert few == 0
    assert 2e7 < many < 4e7


def test_logits_that_must_be_kept_for_log_probabilities_have_room() -> None:
    asked = {"prompts": ["one"], "max_new_tokens": 16}
    guesses = {"prompts": ["one", {"prompt": "two", "prompt_lookup_num_tokens": 2}]}
    kept = [
        generate_request({**asked, **options}, {}).kept
        for options in (
            {"output_logprobs": True},
            {"num_beams": 2},
            {"output_logprobs": True, "num_beams": 2},
            {"output_logprobs": True, **guesses},
            {"output_logprobs": True, **guesses, "speculation": "batched"},
        )
    ]
    assert kept == [0, 0, 16, 0, 16]
    geometry, model = Geometry(vocabulary=100), outline({"w": 10})
    more, less = (memory_needs(model, geometry, Request(3, kept=count)).bytes for count in (16, 0))
    assert more - less == 3 * 16 * 100 * 4


def test_guesses_are_judged_in_lockstep_or_in_one_forward() -> None:
    asked = {"prompts": ["one", {"prompt": "two", "prompt_lookup_num_tokens": 7}], "prompt_lookup_num_tokens": 3}
    exact, batched = (generate_request({**asked, "speculation": mode}, {}) for mode in ("exact", "batched"))
    assert (exact.positions, exact.judged, exact.sequences) == (8, 7, 1)
    assert (batched.positions, batched.judged, batched.sequences) == (8, 0, 1)


def test_beside_an_encoder_the_answer_has_positions_of_its_own(tmp_path: Path) -> None:
    generate = {"prompts": [[5] * 200], "max_new_tokens": 95}
    for apart, length in ((False, 320), (True, 96)):
        tmp_path.joinpath("config.json").write_text(json.dumps({"is_encoder_decoder": apart, "num_layers": 2}))
        request = generate_request(generate, {"path": str(tmp_path)})
        assert (request.prompt, request.length) == (208, length)
