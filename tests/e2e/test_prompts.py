"""Thousands of prompts: each answered once, whatever kills a run, and as it would be alone where that is asked for."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.benchmarks.kills import write_prompts
from tests.e2e.conftest import Finished, Replay, kill_when, start

EMBEDDED = Path(str(resources.files("offstage.conf") / "checkpoints" / "tiny"))
COUNT = 24
FIXED = ("generate.max_new_tokens=6", "generate.batch_size=4")


def generations(finished: Finished) -> list[dict]:
    folder = next(Path(stage["artifact"]) for stage in finished.record["stages"] if stage["name"] == "generate")
    return [json.loads(line) for line in folder.joinpath("generations.jsonl").read_text().splitlines()]


def unfinished(folder: Path) -> bytes:
    """Return what a run in ``folder`` that hasn't ended has on the disk."""
    parts = list(folder.glob("outputs/cache/generate/.tmp-*/generations.jsonl"))
    return parts[0].read_bytes() if parts else b""


def plain(prompts: list[list[int]], new: int) -> list[list[int]]:
    """Return the tokens that transformers has the embedded model answer each of ``prompts`` with, one by one."""
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    ids = [torch.tensor([prompt]) for prompt in prompts]
    options = {"max_new_tokens": new, "do_sample": False, "repetition_penalty": 1.2}  # as ``model=tiny`` has it
    return [model.generate(each, **options)[0, each.shape[1] :].tolist() for each in ids]


SAMPLED = ("generate.do_sample=true", "seed=5")


@pytest.mark.long_form
@pytest.mark.parametrize(
    ("options", "kills"),
    [pytest.param((), (1, 16), marks=pytest.mark.long_form), (SAMPLED, (1, 16))],
    ids=["greedy", "sampled"],
)
def test_killed_again_and_again_no_prompt_is_answered_twice(
    tmp_path: Path, offstage_here: Callable[..., Finished], options: tuple[str, ...], kills: tuple[int, ...]
) -> None:
    write_prompts(tmp_path / "prompts.jsonl", COUNT)
    asked = [f"generate.prompts_file={tmp_path / 'prompts.jsonl'}", *FIXED, *options]
    rows = generations(offstage_here(*asked))
    assert [row["index"] for row in rows] == list(range(COUNT))
    assert len(rows[3]["token_ids"]) == 2
    shutil.rmtree(tmp_path / "outputs" / "cache" / "generate")
    kept = b""
    for lines in kills:
        enough = partial(lambda lines: unfinished(tmp_path).count(b"\n") >= lines, lines)
        assert kill_when(enough, start(tmp_path, *asked)), "it was killed before its end"
        lasting = unfinished(tmp_path)
        assert lasting.startswith(kept), "what was answered is kept as it was"
        kept = lasting[: lasting.rfind(b"\n") + 1]
    assert kept.count(b"\n") >= kills[-1]
    done = offstage_here(*asked)
    assert generations(done) == rows
    assert unfinished(tmp_path) == b""
    earlier = done.record["metrics"]["earlier_prompts"]
    assert 0 < earlier < COUNT
    assert f"; went on after {earlier} prompts, which the times aren't of" in done.out


def test_by_default_each_prompt_has_the_answer_that_it_has_alone(offstage_here: Callable[..., Finished]) -> None:
    prompts = [[5, 6, 7], [8, 9], [4] * 30]
    streamed = ("max_memory.cpu=1500kB", "storage.io=direct", "hardware.rates={storage: 10MB, host: 10GB}")
    asked = ("generate.max_new_tokens=4", *streamed)
    together = offstage_here(f"generate.prompts={prompts}", *asked)
    assert together.record["metrics"]["lockstep"] == 3
    assert [output["batch"] for output in together.record["outputs"]] == [1, 2, 0], "each is a batch of its own"
    resident = offstage_here(f"generate.prompts={prompts}", "generate.max_new_tokens=4", "max_memory.cpu=100MB")
    assert resident.record["metrics"]["lockstep"] == 1, "nothing streams: they follow each other"
    assert together.tokens == resident.tokens == plain(prompts, 4)


def test_a_batch_is_told_and_exact_answers_are_those_of_each_prompt_alone(
    tmp_path: Path, offstage_here: Callable[..., Finished]
) -> None:
    prompts = [[5, 6, 7], [8, 9], [4] * 30]
    batched = offstage_here(f"generate.prompts={prompts}", "generate.max_new_tokens=4", "generate.batch_size=2")
    assert [output["batch"] for output in batched.record["outputs"]] == [0, 1, 0]
    exact = offstage_here(f"generate.prompts={prompts}", "generate.max_new_tokens=4", "generate.exact=true")
    assert exact.tokens == plain(prompts, 4)


def test_prompt_lookup_takes_several_prompts(offstage_here: Callable[..., Finished]) -> None:
    ids = "generate.prompts=[[5,6,5,6,5],[7,8,7,8,7,8],[9,9,9]]"
    plain = offstage_here(ids, "generate.max_new_tokens=5", "generate.exact=true")
    guessed = offstage_here(ids, "generate.max_new_tokens=5", "generate.prompt_lookup_num_tokens=2")
    assert guessed.code == 0, guessed.err
    assert [o["token_ids"] for o in guessed.record["outputs"]] == [o["token_ids"] for o in plain.record["outputs"]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": ""}', "generate.prompts_file line 2.prompt: '' is empty"),
        ('{"token_ids": [1], "do_sample": true, "top_p": 1.5}', "line 2.top_p: 1.5 is refused by transformers"),
        ('{"prompt": "x"', 'generate.prompts_file line 2: \'{"prompt": "x"\' is no JSON'),
        ('{"messages": [{"role": "user", "content": "x"}]}', "generate.chat: the tokenizer has no template for chats"),
        (json.dumps({"token_ids": [3] * 5000}), "generate.prompts_file line 2: 5000 tokens are more than"),
    ],
)
def test_a_bad_line_is_named_before_any_weight_is_read(
    tmp_path: Path, offstage_here: Callable[..., Finished], line: str, words: str
) -> None:
    tmp_path.joinpath("p.jsonl").write_text('{"prompt": "fine"}\n' + line + "\n")
    done = offstage_here("generate.prompts_file=p.jsonl")
    assert done.code == 2
    assert words in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not tmp_path.joinpath("outputs/cache/shard_load").exists()


BAD: dict[str, tuple[list[str], str]] = {
    "an empty prompt": (["generate.prompts=['']"], "generate.prompts[0]: '' is empty"),
    "no token ids": (["generate.prompts=[[]]"], "generate.prompts[0]: [] is empty"),
    "no prompts": (["generate.prompts=[]"], "generate.prompts: [] is no list of prompts"),
    "an empty file": (["generate.prompts_file=empty.txt"], "empty.txt' holds no prompt"),
    "beyond the context": (["generate.prompts_file=long.txt"], "file line 1: 4002 tokens are more than the model's"),
    "Latin-1": (["generate.prompts_file=latin.txt"], "file line 2: 'FOLDER/latin.txt' isn't UTF-8 there"),
    "broken JSON lines": (["generate.prompts_file=broken.jsonl"], "generate.prompts_file line 3: '{\"prompt\": '"),
    "cold sampling": (
        ["generate.do_sample=true", "generate.temperature=0"],
        "generate.temperature: 0 is refused by transformers: ValueError: `temperature` (=0) has to be a strictly "
        "positive float, otherwise your next token scores will be invalid.; give a number above 0, or "
        "generate.do_sample=false",
    ),
    "more than all": (["generate.do_sample=true", "generate.top_p=1.5"], "generate.top_p: 1.5 is refused by"),
    "no beams": (["generate.num_beams=0"], "generate.num_beams: 0 is no number of beams; give a whole number from 1"),
    "no answers": (["generate.num_return_sequences=true"], "num_return_sequences: True is no number of sequences"),
    "no batch": (
        ["generate.batch_size=large"],
        "generate.batch_size: 'large' is neither a whole number from 1, auto nor null",
    ),
    "a stop that nobody reads": (
        ["model.path=bare", "generate.prompts=[[5,6]]", "generate.stop_strings=[end]"],
        "generate.stop_strings: ['end'] needs a tokenizer, and the checkpoint has none; set model.tokenizer",
    ),
}


def test_bad_input_is_one_clear_line_before_any_weight_is_read(
    tmp_path: Path, offstage_here: Callable[..., Finished]
) -> None:
    tmp_path.joinpath("empty.txt").write_text("\n  \n")
    tmp_path.joinpath("long.txt").write_text("in " * 4000)
    tmp_path.joinpath("latin.txt").write_bytes("fine\nnaïve\n".encode("latin-1"))
    tmp_path.joinpath("broken.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": \n')
    bare = Path(shutil.copytree(EMBEDDED, tmp_path / "bare"))
    for file in bare.glob("tokenizer*"):
        file.unlink()
    for wrong, (arguments, words) in BAD.items():
        done = offstage_here(*arguments)
        assert (done.code, done.err.count("\n")) == (2, 1), (wrong, done.err)
        assert words.replace("FOLDER", str(tmp_path)) in done.err, wrong
        assert done.record["status"] == "failed"
        assert not tmp_path.joinpath("outputs/cache/shard_load").exists(), wrong


def test_a_bad_file_hides_no_other_fault(offstage_here: Callable[..., Finished]) -> None:
    done = offstage_here("generate.prompts_file=gone.txt", "generate.batch_size=0", "max_memory.cpu=much")
    assert done.code == 2
    keys = [line.removeprefix("offstage: ").partition(":")[0] for line in done.err.splitlines()]
    assert sorted(keys) == ["generate.batch_size", "generate.prompts_file", "max_memory.cpu"]


def give(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    """Have standard input hold ``text``."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))


@pytest.mark.long_form
def test_prompts_of_standard_input_stand_in_the_record_and_are_replayed(
    offstage_here: Callable[..., Finished], replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ("generate.prompts_file=-", "generate.max_new_tokens=3")
    give(monkeypatch, b'{"token_ids": [5, 6], "max_new_tokens": 2}\n\n"The weights"\n')
    piped = offstage_here(*ask)
    assert piped.code == 0, piped.err
    assert [output["prompt"] for output in piped.record["outputs"]] == [[5, 6], "The weights"]
    assert [len(tokens) for tokens in piped.tokens] == [2, 3]
    code, out, err = replay(next(Path("outputs").glob("runs/*/*/run.json")).parent)
    assert (code, "tokens    the same" in out) == (0, True), err
    give(monkeypatch, b"The weights\n")
    other = offstage_here(*ask)
    assert [output["prompt"] for output in other.record["outputs"]] == ["The weights"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "generate.prompts_file: standard input holds no prompt"),
        (b"fine\n\xff\n", "generate.prompts_file line 2: standard input isn't UTF-8"),
        (b'{"prompt": "x"}\n{"prompt": \n', "generate.prompts_file line 2: '{\"prompt\": ' is no JSON"),
        (b"[" + b"5, " * 5000 + b"5]", "generate.prompts_file line 1: 5001 tokens are more than the model's context"),
    ],
)
def test_bad_standard_input_is_named_by_its_line(
    offstage_here: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch, text: bytes, words: str
) -> None:
    give(monkeypatch, text)
    done = offstage_here("generate.prompts_file=-")
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert words in done.err
    assert done.record["status"] == "failed"


def test_the_jobs_of_a_sweep_can_not_share_standard_input(offstage_here: Callable[..., Finished]) -> None:
    done = offstage_here("-m", "generate.prompts_file=-", "seed=1,2")
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert "generate.prompts_file: '-' is standard input, which the jobs of a sweep can't share" in done.err
    assert not done.records


def test_a_batch_size_of_auto_is_what_the_plan_says(tmp_path: Path, offstage_here: Callable[..., Finished]) -> None:
    write_prompts(tmp_path / "prompts.jsonl", COUNT)
    asked = ("generate.prompts_file=prompts.jsonl", "generate.max_new_tokens=3")
    done = offstage_here(*asked, "generate.batch_size=auto")
    assert done.code == 0, done.err
    (plan,) = (Path(stage["artifact"]) for stage in done.record["stages"] if stage["name"] == "plan")
    chosen = json.loads(plan.joinpath("plan.json").read_text())["batch_size"]
    assert done.record["metrics"]["batch_size"] == chosen == COUNT
    assert f"batches of {chosen}" in done.out
    given = offstage_here(*asked, f"generate.batch_size={chosen}")
    assert given.tokens == done.tokens
    again = offstage_here(*asked, "generate.batch_size=auto")
    assert again.cached["generate"]


def test_log_probabilities_are_told_of_each_token_where_they_are_asked_for(
    offstage_here: Callable[..., Finished],
) -> None:
    asked = ("generate.prompts=[[5,6,7],[8,9]]", "generate.max_new_tokens=4")
    plain, with_logprobs = offstage_here(*asked), offstage_here(*asked, "generate.output_logprobs=true")
    assert with_logprobs.tokens == plain.tokens
    assert "logprobs" not in plain.record["outputs"][0]
    kept = [row["logprobs"] for row in generations(with_logprobs)]
    assert kept == [output["logprobs"] for output in with_logprobs.record["outputs"]]
    assert [len(row) for row in kept] == [len(tokens) for tokens in with_logprobs.tokens]
    assert all(-20 < value <= 0 for row in kept for value in row)
    refused = offstage_here(*asked, "generate.output_logprobs=5")
    said = "offstage: generate.output_logprobs: 5 is neither true nor false; the default is False\n"
    assert (refused.code, refused.err) == (2, said)
