"""Scores of the command: those of the plain model wherever weights lie, whatever kills a run, and nothing else."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    LlamaConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from offstage.stages.inputs.texts import ScoreOptions, read_scored_texts
from offstage.stages.score.windows import Window, cut, encode
from tests.e2e.conftest import Finished, Replay, kill_when, start
from tests.e2e.test_keys import MODULES, save_weights
from tests.e2e.test_lockstep import KEEPING
from tests.long_form import in_ci
from tests.stages.score.test_likelihoods import CAUSAL, HALVES, SIZES, made, plainly, tokens

Run = Callable[..., Finished]
EMBEDDED = Path(__file__).parents[2] / "conf" / "checkpoints" / "tiny"
SCORE = "stages=score"


def artifact(finished: Finished) -> Path:
    assert finished.code == 0, finished.err
    return next(Path(stage["artifact"]) for stage in finished.record["stages"] if stage["name"] == "score")


def texts_of(finished: Finished) -> list[dict[str, Any]]:
    texts: list[dict[str, Any]] = json.loads(artifact(finished).joinpath("score.json").read_text())["texts"]
    return texts


def windows_of(finished: Finished) -> list[dict[str, Any]]:
    return [json.loads(line) for line in artifact(finished).joinpath("scores.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("architecture", in_ci("mixtral", "t5", of=["llama", "gpt2", "qwen2", "mixtral", "t5"]))
def test_streamed_from_disk_they_are_bitwise_those_of_the_plain_model(
    architecture: str, tmp_path: Path, offstage_here: Run
) -> None:
    config = {**CAUSAL, **HALVES}[architecture]
    folder = tmp_path / "checkpoint"
    whole = made(config, torch.bfloat16)
    whole.save_pretrained(folder, max_shard_size="40KB")
    pair = {"context": tokens(11), "continuation": tokens(7, 4)}
    texts = [pair, {"context": tokens(3), "continuation": tokens(30, 9)}]
    texts += [] if config.is_encoder_decoder else [tokens(150)]
    tmp_path.joinpath("texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    half = str(int(0.6 * sum(parameter.nbytes for parameter in whole.parameters())))
    done = offstage_here(
        SCORE, f"model.path={folder}", f"max_memory.cpu={half}", "device_map=sequential", "storage.io=direct",
        "score.texts_file=texts.jsonl", "score.window=64", "score.stride=48",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.record["metrics"]["streamed_bytes_per_forward"] > 0, "nothing lay on disk: the test proves nothing"
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    plain = auto.from_pretrained(folder)
    options = ScoreOptions(texts=texts)
    encoded = [
        encode(name, text, None, has_encoder=bool(config.is_encoder_decoder))
        for name, text in read_scored_texts(options).items()
    ]
    rows, losses = windows_of(done), []
    windows: list[Window] = list(cut(encoded, window=64, stride=48))
    for window, row in zip(windows, rows, strict=True):
        values, greedy, loss = plainly(plain, window)
        assert (row["token_ids"], row["log_likelihoods"], row["greedy"]) == (list(window.scored), values, greedy)
        losses.append((float(loss), len(values)))
    count = sum(number for _, number in losses)
    mean = sum(loss * number for loss, number in losses) / count
    assert done.record["metrics"]["scored_tokens"] == count
    assert done.record["metrics"]["perplexity"] == pytest.approx(math.exp(mean), rel=2e-2 if len(rows) == 2 else 1e-5)


PLACES = {
    "resident": ["max_memory.cpu=1GB"],
    "on disk": ["max_memory.cpu=2MB", "storage.io=direct"],
    "mapped": ["max_memory.cpu=2MB", "storage.io=mmap"],
    "on simulated accelerators": ["hardware=2x24gb", "max_memory={0: 2MB, 1: 2MB, cpu: 2MB}"],
}
TEXTS = "score.texts=['The weights of a model.', {context: 'Return the', continuation: ' number of elements.'}]"


def test_they_are_the_same_wherever_the_weights_lie(offstage_here: Run) -> None:
    by_place = {place: texts_of(offstage_here(SCORE, TEXTS, *options)) for place, options in PLACES.items()}
    for place, texts in by_place.items():
        assert texts == by_place["resident"], place
    text, pair = by_place["resident"]
    assert text["tokens"] == len(text["token_ids"]) == len(text["log_likelihoods"]) == len(text["greedy"])
    assert text["bytes"] == len("The weights of a model.")
    assert text["log_likelihood"] == math.fsum(text["log_likelihoods"])
    assert pair["context"] == "Return the"
    assert pair["bytes"] == len(" number of elements.")


LONG = ("score.text_file=long.txt", "score.window=48", "score.stride=32", "score.batch_size=2")


def write_text(folder: Path) -> None:
    words = "The weights wait offstage until their cue, and the model returns a tensor of the same shape. "
    folder.joinpath("long.txt").write_text(words * 60)


def part_of(folder: Path) -> Path | None:
    return next(iter(folder.glob("outputs/cache/score/.tmp-*/scores.jsonl")), None)


def killed_after(folder: Path, lines: int, *options: str) -> bool:
    """Run the command, and kill it when so many windows are on the disk; return whether it was still at it."""

    def scored() -> bool:
        part = part_of(folder)
        return part is not None and part.read_bytes().count(b"\n") >= lines

    return kill_when(scored, start(folder, *options))


@pytest.mark.long_form
def test_killed_again_and_again_no_window_is_scored_twice(tmp_path: Path, offstage_here: Run) -> None:
    write_text(tmp_path)
    whole = offstage_here(SCORE, *LONG)
    rows, texts = windows_of(whole), texts_of(whole)
    assert len(rows) > 20
    shutil.rmtree(tmp_path / "outputs" / "cache" / "score")
    kept: list[bytes] = []
    for lines in (2, 12):
        if killed_after(tmp_path, lines, SCORE, *LONG):
            part = part_of(tmp_path)
            assert part is not None
            lasting = part.read_bytes().splitlines()
            assert lasting[: len(kept)] == kept, "what was scored is kept as it was"
            kept = lasting
    assert len(kept) >= 2
    again = offstage_here(SCORE, *LONG)
    assert (windows_of(again), texts_of(again)) == (rows, texts)
    assert again.record["metrics"]["perplexity"] == whole.record["metrics"]["perplexity"]
    earlier = again.record["metrics"]["earlier_windows"]
    assert f"; went on after {earlier} windows, which the times aren't of" in again.out
    (output,) = again.record["outputs"]
    assert output["text_sha256"] == hashlib.sha256(tmp_path.joinpath("long.txt").read_bytes()).hexdigest()
    assert output["scores_sha256"] == whole.record["outputs"][0]["scores_sha256"]


@pytest.mark.long_form
def test_windows_of_a_batch_are_told_and_exact_ones_are_scored_alone(tmp_path: Path, offstage_here: Run) -> None:
    write_text(tmp_path)
    alone, exact, together = (
        offstage_here(SCORE, *LONG[:3], f"score.batch_size={size}", *more)
        for size, more in ((1, ()), (8, ("score.exact=true",)), (8, ()))
    )
    assert texts_of(exact) == texts_of(alone)
    rows = windows_of(together)
    assert {row["rows"] for row in rows} >= {8}
    assert together.record["metrics"]["perplexity"] == pytest.approx(alone.record["metrics"]["perplexity"], rel=1e-2)
    auto = offstage_here(SCORE, *LONG[:3], "score.batch_size=auto")
    assert max(row["rows"] for row in windows_of(auto)) > 1


BAD = [
    (["score.texts=['']"], "score.texts[0]: '' is empty"),
    (["score.texts=[[5]]"], "score.texts[0]: [5] is one token"),
    (["score.texts=[[5,99999]]"], "token id 99999 is beyond the model's 3072 words"),
    (["score.window=4096"], "score.window: 4096 tokens are more than the model's context of 2048"),
    (["score.window=8", "score.stride=9"], "score.stride: 9 tokens are more than a window of 8"),
    (["score.texts=[{context: a, continuation: ''}]"], "score.texts[0].continuation: '' is empty"),
    (["score.window=8", "score.texts=[{context: [5,6,7,8,9,5], continuation: [5,6,7,8]}]"], "more than the 9 of"),
    (["score.batch_size=many"], "score.batch_size: 'many' is"),
    (["score.textfile=x"], "score.textfile"),
    (["model.class=LlamaModel"], "model.class: LlamaModel gives no logits of the token that comes next"),
]


@pytest.mark.parametrize(("options", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_input_is_one_line_before_any_weight_is_read(
    options: list[str], words: str, offstage_here: Run, tmp_path: Path
) -> None:
    done = offstage_here(SCORE, *options)
    assert done.code == 2
    assert words in done.err
    assert "Traceback" not in done.err
    assert not tmp_path.joinpath("outputs/cache/shard_load").exists()
    if "textfile" not in words:
        assert len(done.err.strip().splitlines()) == 1


BERT = BertConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=90)
HALF = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
SMALL = {**HALF, "d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 90}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
REFUSED = [
    (BertModel(BERT), "BertModel gives no logits of the token that comes next"),
    (BertForMaskedLM(BERT), "BertForMaskedLM gives no logits of the token that comes next"),
    (
        WhisperForConditionalGeneration(WhisperConfig(**SMALL, **ENDS)),
        "WhisperForConditionalGeneration reads input_features and no token ids",
    ),
    (
        M2M100ForConditionalGeneration(M2M100Config(**SMALL, **ENDS)),
        "M2M100ForConditionalGeneration doesn't say what its decoder begins with",
    ),
]


@pytest.mark.parametrize(("model", "words"), REFUSED, ids=[type(model).__name__ for model, _ in REFUSED])
def test_a_model_that_foretells_nothing_is_refused_by_name(
    model: Any, words: str, offstage_here: Run, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "checkpoint")
    done = offstage_here(SCORE, "model.path=checkpoint", "score.texts=[[5,6,7]]")
    assert done.code == 2
    assert f"model.class: {words}" in done.err
    assert not tmp_path.joinpath("outputs/cache/shard_load").exists()


def test_any_module_of_logits_scores_and_another_text_remakes_the_scores_alone(
    offstage_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in MODULES.items():
        tmp_path.joinpath(name).write_text(text)
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
    save_weights(tmp_path)
    module = [SCORE, "model=module", "model._target_=net_keyed.Net", "model.path=.", "max_memory.cpu=1GB"]
    first = offstage_here(*module, "score.texts=[[3,4,5]]")
    (text,) = texts_of(first)
    assert text["tokens"] == 2
    again = offstage_here(*module, "score.texts=[[3,4,6],[7,8]]", "score.batch_size=2")
    assert [row["rows"] for row in windows_of(again)] == [1, 1], "nothing is known of masks"
    assert not again.cached["score"]
    assert again.cached["shard_load"]
    assert texts_of(again)[0]["log_likelihoods"][0] == text["log_likelihoods"][0]


def test_what_a_model_keeps_of_one_window_no_other_sees(
    offstage_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.joinpath("keeping.py").write_text(KEEPING)
    monkeypatch.setattr(sys, "path", list(sys.path))
    made: dict[str, Any] = {}
    exec(KEEPING, made)
    save_file(made["Keeping"]("in place", False).state_dict(), tmp_path / "model.safetensors")
    asked = [SCORE, "model=module", "model._target_=keeping.Keeping", "model.way='in place'", "model.hides=false"]
    asked += ["model.path=.", "max_memory.cpu=5MB"]
    alone, after = (texts_of(offstage_here(*asked, f"score.texts={texts}")) for texts in ("[[3,4]]", "[[3,4],[3,4]]"))
    assert [text["log_likelihoods"] for text in after] == [alone[0]["log_likelihoods"]] * 2


def test_text_without_a_tokenizer_and_an_encoder_without_a_context_are_told(offstage_here: Run, tmp_path: Path) -> None:
    made(HALVES["t5"], torch.float32).save_pretrained(tmp_path / "t5")
    text = offstage_here(SCORE, "model.path=t5", "score.texts=[{context: a, continuation: b}]")
    bare = offstage_here(SCORE, "model.path=t5", "score.texts=[[5,6,7]]")
    assert (text.code, bare.code) == (2, 2)
    assert "is text and the checkpoint has no tokenizer" in text.err
    assert "give a mapping of context and continuation" in bare.err


@pytest.mark.long_form
def test_a_replay_scores_again_and_tells_a_likelihood_that_differs(
    offstage_here: Run, replay: Replay, tmp_path: Path
) -> None:
    assert offstage_here(SCORE, TEXTS).code == 0
    (path,) = tmp_path.glob("outputs/runs/**/run.json")
    code, out, err = replay(path)
    assert code == 0, err
    assert "outputs   the same" in out
    record = json.loads(path.read_text())
    record["outputs"][1]["log_likelihood"] += 0.5
    path.write_text(json.dumps(record))
    code, out, _ = replay(path)
    assert code == 1
    assert "output 1" in out
    assert "log_likelihood: was" in out


@pytest.mark.long_form
@pytest.mark.from_nothing
@pytest.mark.of_the_process("what it holds is measured, and a fork shares memory with its server")
@pytest.mark.parametrize("dtype", in_ci(torch.bfloat16, of=[torch.float32, torch.bfloat16]), ids=str)
def test_the_peak_of_a_windows_logits_is_as_predicted(dtype: torch.dtype, offstage: Run, tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, vocab_size=50257, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(tmp_path / "checkpoint")
    tmp_path.joinpath("ids.jsonl").write_text(json.dumps(tokens(1024)) + "\n")
    done = offstage(SCORE, "model.path=checkpoint", "score.texts_file=ids.jsonl", "max_memory.cpu=1GB")
    assert done.code == 0, done.err
    predicted, measured = (done.record["memory"][kind]["cpu"] for kind in ("predicted", "measured"))
    logits = 1024 * 50257 * dtype.itemsize
    assert measured > 2.5e8 + logits, "the logits of the whole window are held at once"
    assert predicted == pytest.approx(measured, rel=0.06)
