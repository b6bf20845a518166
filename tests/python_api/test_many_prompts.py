"""``generate``, ``score`` and ``embed`` of a loaded model: what the stages of those names come to, from Python."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import offstage
from offstage.pipeline.stage_chain import StageChain
from offstage.stages.empty_init.stage import EmptyInitStage
from tests.long_form import in_ci
from tests.python_api.rates import RATES

ROOT = Path(__file__).parents[2]
TINY = ROOT / "conf" / "checkpoints" / "tiny"
PROMPTS = ["The", "A list of names that", "It", [5, 6, 7, 8, 9, 10, 11], "Return the value of the key, or"]
TEXTS = ["The weights of a model are its parameters.", "A file", [5, 6, 7, 8]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[offstage.LoadedModel]:
    cache = tmp_path_factory.mktemp("cache")
    options: dict[str, Any] = {"max_memory": {"cpu": "3MB"}, "hardware": {"rates": RATES}, "storage": {"io": "direct"}}
    with offstage.load(TINY, cache=cache, max_length=64, **options) as model:
        assert model.plan.serving, "weights stream"
        yield model


@pytest.fixture(scope="module")
def plain() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY).eval()


def ids_of(prompt: Any) -> list[int]:
    return prompt if isinstance(prompt, list) else AutoTokenizer.from_pretrained(TINY)(prompt)["input_ids"]


def artifact(loaded: offstage.LoadedModel, name: str, keys: dict[str, Any]) -> Path:
    """Return the folder of what a run's stage leaves, in a chain of all stages with the config of the load."""
    from offstage.pipeline.installed_stages import stage_class
    from offstage.pipeline.typed_config import defaults

    chain = loaded._chain
    stages = [EmptyInitStage(), *(stage for key, stage in chain.stages.items() if key != "empty_init")]
    stage = stage_class(name)()
    config = {**chain.config, **defaults(stage.config_class), **keys, "stages": [*chain.stages, name]}
    run = StageChain([*stages, stage], config, cache=chain.cache)
    for each in run.stages:
        run.obtain(each)
    run.live("dispatch").streamer.remove()
    run.release()
    return run.artifacts[name].folder


@pytest.mark.parametrize("sizes", in_ci({}, of=[{}, {"lockstep": 1}, {"lockstep": 3}]))
def test_tokens_are_those_of_the_plain_model(sizes: dict[str, Any], loaded: offstage.LoadedModel, plain: Any) -> None:
    answers = loaded.generate(PROMPTS, max_new_tokens=6, chat=False, **sizes)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = ids_of(prompt)
        wanted = plain.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, len(ids) :].tolist()
        assert answer.prompt_token_ids == tuple(ids)
        assert list(answer.token_ids) == wanted[: len(answer.token_ids)]
        assert answer.text


def test_by_default_several_share_a_pass_where_weights_stream(loaded: offstage.LoadedModel) -> None:
    def streamed(**sizes: Any) -> int:
        before = loaded.traffic.streamed_bytes
        loaded.generate(PROMPTS, max_new_tokens=6, **sizes)
        return loaded.traffic.streamed_bytes - before

    assert streamed() < streamed(lockstep=1)


def test_sampled_tokens_are_those_of_each_alone(loaded: offstage.LoadedModel) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "temperature": 0.9, "logprobs": True}
    together = loaded.generate(PROMPTS, seed=3, **options)
    alone = [loaded.generate([prompt], seed=3 + place, **options)[0] for place, prompt in enumerate(PROMPTS)]
    assert [(one.token_ids, one.logprobs) for one in together] == [(one.token_ids, one.logprobs) for one in alone]
    assert all(len(one.logprobs or ()) == len(one.token_ids) for one in together)


def test_they_are_those_of_the_stage(loaded: offstage.LoadedModel) -> None:
    node = {"prompts": PROMPTS, "max_new_tokens": 6, "do_sample": False, "output_logprobs": True}
    kept = json.loads((artifact(loaded, "generate", {"generate": node}) / "generation.json").read_text())["outputs"]
    generations = loaded.generate(PROMPTS, max_new_tokens=6, logprobs=True)
    assert [(list(one.token_ids), one.text, list(one.logprobs or ())) for one in generations] == [
        (one["token_ids"], one["text"], one["logprobs"]) for one in kept
    ]


def test_scores_are_those_of_the_stage(loaded: offstage.LoadedModel) -> None:
    node = {"texts": TEXTS, "window": 8, "stride": 4}
    kept = json.loads((artifact(loaded, "score", {"score": node}) / "score.json").read_text())["texts"]
    scores = loaded.score(TEXTS, window=8, stride=4)
    names = ("log_likelihood", "perplexity", "bits_per_byte", "is_greedy")
    assert [[getattr(one, name) for name in names] for one in scores] == [[one[name] for name in names] for one in kept]
    assert [list(one.logprobs) for one in scores] == [one["log_likelihoods"] for one in kept]
    assert [list(one.token_ids) for one in scores] == [one["token_ids"] for one in kept]


def test_embeddings_are_those_of_the_stage(tmp_path: Path) -> None:
    node = {"texts": TEXTS[:2], "pooling": "mean", "normalize": True, "batch_size": 1}
    options: dict[str, Any] = {"class": "AutoModel", "hardware": {"rates": RATES}, "max_memory": {"cpu": "3MB"}}
    with offstage.load(TINY, cache=tmp_path, max_length=64, **options) as headless:
        embeddings = headless.embed(TEXTS[:2], batch_size=1)
        kept = load_file(artifact(headless, "forward", {"forward": node}) / "outputs.safetensors")
    assert torch.equal(embeddings, kept["embeddings"])
    assert torch.allclose(embeddings.norm(dim=1), torch.ones(2))


@pytest.mark.long_form
def test_two_threads_have_the_answers_of_one(loaded: offstage.LoadedModel) -> None:
    calls = [lambda: loaded.generate(PROMPTS[:3], max_new_tokens=4), lambda: loaded.score(TEXTS)] * 2
    wanted = [call() for call in calls]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda call: call(), calls)) == wanted


@pytest.mark.parametrize(
    ("method", "given", "options", "message"),
    [
        ("generate", [], {}, r"generate\.prompts: \[\] is no list of prompts"),
        (
            "generate",
            torch.ones(2, 3).long(),
            {},
            r"a Tensor is no list of prompts; give each one's token ids",
        ),
        ("generate", ["a"], {"temperature": "hot"}, r"generate\.temperature: 'hot' is no number"),
        ("generate", ["a"], {"temperatur": 1}, r"generate\.temperatur: no such option.*temperature"),
        ("generate", ["a"], {"max_new_tokens": 0}, r"generate\.max_new_tokens: 0 is no number of tokens"),
        ("generate", ["a"], {"batch_size": "many"}, r"generate\.batch_size: 'many' is"),
        ("generate", ["a"], {"seed": -1}, r"seed: -1 is no seed"),
        ("generate", ["a", 3], {}, r"generate\.prompts\[1\]: 3 is neither text"),
        ("generate", [[10**6]], {}, r"generate\.prompts: token id 1000000 is beyond"),
        ("score", [], {}, r"score\.texts: \[\] holds no text"),
        ("score", ["a b c"], {"window": 1}, r"score\.window: 1 is"),
        ("score", ["a b c"], {"window": 4, "stride": 5}, r"score\.stride: 5 tokens are more"),
        ("embed", [], {}, r"forward: nothing is given"),
        ("embed", ["a"], {"pooling": "max"}, r"forward\.pooling: 'max' is none of mean, cls, last"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_name(
    method: str, given: Any, options: dict[str, Any], message: str, loaded: offstage.LoadedModel
) -> None:
    with pytest.raises(offstage.ConfigError, match=message):
        getattr(loaded, method)(given, **options)
    assert loaded.generate(["The"], max_new_tokens=2), "and it goes on"


def test_text_without_a_tokenizer_and_a_closed_model_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for file in [*TINY.glob("*.safetensors*"), TINY / "config.json"]:
        shutil.copy(file, folder)
    with offstage.load(folder, cache=tmp_path / "cache", max_length=16, hardware={"rates": RATES}) as model:
        with pytest.raises(offstage.ConfigError, match=r"generate\.prompts\[0\]: 'The' is text and the checkpoint has"):
            model.generate(["The"])
        assert model.generate([[5, 6]], max_new_tokens=2)[0].text is None
    with pytest.raises(offstage.ConfigError, match="generate: this model was closed; load it again"):
        model.generate([[5, 6]])


def test_the_defaults_are_the_command_s(loaded: offstage.LoadedModel) -> None:
    greedy = OmegaConf.load(ROOT / "conf" / "generate" / "greedy.yaml")
    defaults = offstage.LoadedModel.generate.__kwdefaults__
    names = ("max_new_tokens", "do_sample", "batch_size", "lockstep")
    assert [defaults[name] for name in names] == [greedy[name] for name in names]


def test_each_answer_says_why_it_ended(loaded: offstage.LoadedModel) -> None:
    (long,) = loaded.generate(["The"], max_new_tokens=7)
    assert (long.finish_reason, len(long.token_ids)) == ("length", 7)
    end, text = long.token_ids[3], loaded.tokenizer.decode(long.token_ids[:5])[-3:]
    first = long.token_ids.index(end) + 1
    cases = [({"eos_token_id": end}, first), ({"eos_token_id": end, "max_new_tokens": first}, first)]
    cases += [({"stop_strings": [text]}, 5), ({"stop_strings": [text], "max_new_tokens": 5}, 5)]
    for options, most in cases:
        (one,) = loaded.generate(["The"], **{"max_new_tokens": 8, **options})
        assert one.finish_reason == "stop"
        assert len(one.token_ids) <= most
    together = loaded.generate(["The", "It"], max_new_tokens=8, stop_strings=[text], batch_size=2)
    assert together[0].finish_reason == "stop"
    assert together[1].finish_reason == ("length" if text not in (together[1].text or "") else "stop")


@pytest.mark.long_form
def test_a_killed_script_goes_on_where_it_was(
    loaded: offstage.LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, options = tmp_path / "answers.jsonl", {"max_new_tokens": 6, "do_sample": True, "seed": 3}
    wanted = loaded.generate(PROMPTS, progress=file, **options)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:2]) + lines[2][:20])  # a kill cuts the third short
    passes = loaded.traffic.streamed_bytes
    with caplog.at_level("INFO", logger="offstage"):
        assert loaded.generate(PROMPTS, progress=file, lockstep=1, **options) == wanted
    assert f"goes on after 2 of {len(PROMPTS)} prompts" in caplog.text
    passes = loaded.traffic.streamed_bytes
    assert loaded.generate(PROMPTS, progress=file, **options) == wanted
    assert loaded.traffic.streamed_bytes == passes, "all of it is there"


def test_a_file_of_something_else_is_refused_and_left_as_it_is(loaded: offstage.LoadedModel, tmp_path: Path) -> None:
    file, notes = tmp_path / "answers.jsonl", tmp_path / "notes.txt"
    loaded.generate(PROMPTS[:2], max_new_tokens=2, progress=file)
    notes.write_text("my notes\n")
    before = file.read_bytes(), notes.read_bytes()
    calls: list[tuple[list[Any], dict[str, Any]]] = [
        (PROMPTS[:1], {"progress": file}),
        (PROMPTS[:2], {"progress": file, "repetition_penalty": 1.5}),
        (PROMPTS[:2], {"progress": file, "seed": 1}),
        (PROMPTS[:2], {"progress": notes}),
    ]
    for prompts, options in calls:
        with pytest.raises(offstage.ConfigError, match=r"progress: .* doesn't hold answers to these prompts"):
            loaded.generate(prompts, **{"max_new_tokens": 2, **options})
    assert (file.read_bytes(), notes.read_bytes()) == before
