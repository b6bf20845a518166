"""lm-eval's tasks on the model ``offstage``: the numbers of lm-eval's own ``hf`` on the plain checkpoint."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

pytest.importorskip("accelerate")
pytest.importorskip("lm_eval")

import lm_eval
import yaml
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from offstage.lm_eval import main, nested
from offstage.pipeline.errors import OffstageError
from tests.pages import ROOT, commands

SENTENCE = "the sail is set on the stern of the ship, and the wind is fair. A cat sat on a mat."
CONTEXT = 64
METRICS = {
    "choose": ("multiple_choice", ["acc", "acc_norm"]),
    "roll": ("loglikelihood_rolling", ["word_perplexity", "byte_perplexity", "bits_per_byte"]),
    "answer": ("generate_until", ["exact_match"]),
}
TARGETS = {"choose": "{{a}}", "roll": "{{(q + choices[2]) * 9}}", "answer": "{{choices[0]}}"}
ROWS = [
    {"q": f"the {word} is", "choices": [" set", " fair", " mat on the stern"], "a": place % 3}
    for place, word in enumerate(["sail", "wind", "cat", "ship on a mat" * 12, ""])
]


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    made.train_from_iterator([SENTENCE] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def make(folder: Path, kind: str) -> Path:
    own, heads = tokenizer(), {"bos_token_id": 0, "eos_token_id": 1}
    own.save_pretrained(folder)
    torch.manual_seed(0)
    if kind == "t5":
        sizes = {"d_model": 64, "d_ff": 96, "num_heads": 4, "d_kv": 16, "num_layers": 4, "n_positions": CONTEXT}
        config = T5Config(vocab_size=len(own), **sizes, **heads, decoder_start_token_id=0, initializer_factor=4.0)
        T5ForConditionalGeneration(config).save_pretrained(folder)
    else:
        heads |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
        sizes = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": CONTEXT}
        LlamaForCausalLM(LlamaConfig(vocab_size=len(own), **sizes, **heads, initializer_range=0.3)).save_pretrained(
            folder
        )
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rows.json").write_text("\n".join(map(json.dumps, ROWS)))
    for name, (kind, metrics) in METRICS.items():
        task: dict[str, Any] = {"task": name, "output_type": kind, "test_split": "test", "doc_to_target": TARGETS[name]}
        task |= {"dataset_path": "json", "doc_to_text": "" if name == "roll" else "{{q}}"}
        task |= {"dataset_kwargs": {"data_files": {"test": f"{folder}/rows.json"}, "cache_dir": f"{folder}/cache"}}
        task |= {"metric_list": [{"metric": metric} for metric in metrics]}
        if name == "choose":
            task |= {"doc_to_choice": "choices", "doc_to_target": "a"}
        if name == "answer":
            task |= {"generation_kwargs": {"until": ["a", "\n"], "max_gen_toks": 12, "do_sample": False}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return folder


@pytest.fixture(scope="module", params=["llama", "t5"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("lm-eval") / request.param, request.param)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def streamed(checkpoint: Path) -> Iterator[Any]:
    options = {"max_memory_cpu": "400kB", "storage.io": "direct", "hardware.rates": {"storage": "1GB", "host": "10GB"}}
    model = get_model("offstage")(str(checkpoint), **options)
    assert model.loaded.plan.serving, "weights stream"
    yield model
    model.loaded.close()


def evaluated(model: Any, folder: Path, names: list[str]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return the metrics of each task, and what the model answered to each of its requests."""
    result = lm_eval.simple_evaluate(
        model,
        tasks=names,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    metrics = {f"{task} {name}": value for task in names for name, value in result["results"][task].items()}
    answers = {task: [sample["resps"] for sample in result["samples"][task]] for task in names}
    return {name: value for name, value in metrics.items() if isinstance(value, float)}, answers


@pytest.fixture(scope="module")
def plainly(checkpoint: Path, tasks: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """What lm-eval's own ``hf`` comes to. No rolling likelihoods of an encoder's decoder, which it doesn't serve."""
    model = get_model("hf")(str(checkpoint), device="cpu", batch_size=1)
    return evaluated(model, tasks, [name for name in METRICS if name != "roll" or model.backend == "causal"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("batch_size", [1, 3, "auto"])
def test_the_numbers_are_those_of_hf_on_the_plain_checkpoint(
    streamed: Any, plainly: tuple[dict[str, Any], dict[str, list[Any]]], tasks: Path, batch_size: Any
) -> None:
    streamed.batch_size_per_gpu, (wanted, kept) = batch_size, plainly
    metrics, answers = evaluated(streamed, tasks, list(kept))
    replies, rel = dict(kept), 1e-5 if batch_size == 1 else 1e-4
    assert metrics == pytest.approx(wanted, rel=rel)
    assert {"choose acc,none", "answer exact_match,none"} <= metrics.keys()
    for own, its in zip(answers.pop("answer"), replies.pop("answer"), strict=True):
        shorter = its[0][0][: len(own[0][0])] if streamed.backend == "seq2seq" else its[0][0]
        assert own[0][0] == shorter, "hf adds the encoder's tokens to what a decoder may answer"
    for task, each in replies.items():
        assert flat(answers[task]) == pytest.approx(flat(each), rel=rel)


def flat(answers: Any) -> list[float]:
    return (
        [number for one in answers for number in flat(one)] if isinstance(answers, list | tuple) else [float(answers)]
    )


@pytest.mark.filterwarnings("ignore")
def test_the_command_of_its_page_finds_the_model_by_name_and_logs_what_the_budget_comes_to(
    tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = [one for one in commands(ROOT / ".github/PYTHON.md") if "offstage.lm_eval --" in one]
    folder = make(tmp_path / "llama", "llama")
    here = {"/ckpt/llama": str(folder), "8GB": "250kB,storage.io=direct", "TASKS": "choose"}
    words = re.sub("|".join(here), lambda found: here[found[0]], command).split()[3:]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words, "--include_path", str(tasks), "--limit", "2"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    shown = capsys.readouterr()
    assert "|choose|" in shown.out
    assert "kB streamed a token" in shown.err
    assert "LoadedModel(LlamaForCausalLM from" in shown.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_memori_cpu": "1GB"}, "max_memori_cpu: unknown option .did you mean 'max_memory'"),
        ({"parallelize": True}, "parallelize: True is an argument of lm-eval's hf; .* give max_memory_0="),
        ({"peft": "lora"}, "peft: 'lora' is an argument of lm-eval's hf; give adapter=FOLDER"),
        ({"max_memory_cpu": "1kB"}, "max_memory"),
        ({"tokenizer": "nowhere"}, "tokenizer"),
    ],
)
def test_what_it_cannot_follow_is_refused_by_name(arguments: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "llama", "llama")
    with pytest.raises(OffstageError, match=words):
        get_model("offstage")(str(folder), **arguments)


def test_arguments_in_one_line_become_nested_ones() -> None:
    given = {"max_memory_cpu": "8GB", "max_memory_0": "2GB", "storage.io": "direct", "dtype": "bfloat16"}
    wanted = {"max_memory": {"cpu": "8GB", 0: "2GB"}, "storage": {"io": "direct"}, "dtype": "bfloat16"}
    assert nested(given) == wanted
