"""``generate.lockstep``: prompts share passes of the weights, and each is answered as if it were alone."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.e2e.conftest import Finished
from tests.long_form import in_ci
from tests.stages.dispatch.streaming.lockstep_grid import saved

Run = Callable[..., Finished]
WORDS = ["The weights wait", "Once upon a time in a far machine there was", "What", "A budget is a contract, so"]
STREAMED = ["max_memory.cpu=1500kB", "storage.io=direct", "generate.max_new_tokens=6"]


@pytest.fixture
def lines(fresh_folder: Path) -> Path:
    """Return a file of prompts, one of which has options of its own."""
    file = fresh_folder / "prompts.jsonl"
    own: list[Any] = [*WORDS, {"prompt": "Longer", "max_new_tokens": 9, "seed": 5}]
    file.write_text("".join(json.dumps(line) + "\n" for line in own))
    return file


@pytest.mark.parametrize("sampled", in_ci("true", of=["false", "true"]))
def test_answers_are_those_of_each_prompt_alone(sampled: str, offstage_here: Run, lines: Path) -> None:
    asked = [f"generate.prompts_file={lines}", f"generate.do_sample={sampled}", "generate.output_logprobs=true"]
    alone = offstage_here(*STREAMED, *asked, "generate.lockstep=1").record
    together = offstage_here(*STREAMED, *asked, "generate.lockstep=4").record
    assert [out["token_ids"] for out in together["outputs"]] == [out["token_ids"] for out in alone["outputs"]]
    assert [out["logprobs"] for out in together["outputs"]] == [out["logprobs"] for out in alone["outputs"]]
    mine, theirs = together["metrics"], alone["metrics"]
    assert mine["passes"] == 6 + 9, "the longest joins as the first four end"
    assert mine["streamed_bytes_per_token"] <= theirs["streamed_bytes_per_token"] / 2
    assert mine["predicted_streamed_bytes_per_token"] == pytest.approx(
        theirs["predicted_streamed_bytes_per_token"] / 4, rel=0.01
    )


@pytest.mark.long_form
def test_what_a_model_keeps_of_one_prompt_no_other_sees(offstage_here: Run, fresh_folder: Path) -> None:
    plain = saved(fresh_folder / "checkpoint", "recurrent_gemma")
    prompts = [[5], [*range(3, 20)], [5]]  # one token alone is added to what is there
    asked = ["model.path=checkpoint", f"generate.prompts={prompts}", "generate.max_new_tokens=2", "generate.exact=true"]
    alone, together = (offstage_here(*asked, f"generate.lockstep={size}").tokens for size in (1, 3))
    assert together == alone
    fresh = plain.generate(torch.tensor([[5]]), max_new_tokens=2, do_sample=False)
    assert alone[0] == alone[2] == fresh[0, 1:].tolist()


KEEPING = """
import torch
from torch._subclasses.fake_tensor import FakeTensor

class Keeping(torch.nn.Module):
    def __init__(self, way, hides, words=32, width=16):
        super().__init__()
        self.way, self.hides = way, hides
        self.embed = torch.nn.Embedding(words, width)
        self.hidden = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
        self.head = torch.nn.Linear(width, words)
        self.register_buffer("seen", torch.zeros(40000, width))

    def forward(self, tokens):
        found = torch.tanh(self.hidden(self.embed(tokens)))
        if self.hides and isinstance(self.head.weight, FakeTensor):
            return self.head(found)
        if self.way == "in place":
            self.seen[:2].add_(found[0, -1])
        else:
            self.seen = self.seen + found[0, -1]
        return self.head(found + self.seen[0])
"""
"""Adds up what it has seen in a buffer of 2.56 MB, in place or as a new one; it may hide that from a rehearsal."""


@pytest.mark.parametrize(
    ("way", "hides", "where"),
    in_ci(
        ("in place", True, "cpu"), ("anew", True, "disk"),
        of=[("in place", False, "cpu"), ("in place", True, "cpu"), ("anew", False, "cpu"), ("anew", True, "cpu"),
            ("anew", False, "disk"), ("anew", True, "disk")],
    ),
)  # fmt: skip
def test_a_large_buffer_is_each_prompts_own_however_it_is_written(
    way: str, hides: bool, where: str, offstage_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.joinpath("keeping.py").write_text(KEEPING)
    monkeypatch.setattr(sys, "path", list(sys.path))
    made: dict[str, Any] = {}
    exec(KEEPING, made)
    torch.manual_seed(0)
    plain = made["Keeping"](way, False)
    for values in plain.state_dict().values():
        torch.nn.init.normal_(values)
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    prompts = [[3, 4], [5], [6, 7, 8, 9], [3, 4]]
    asked = [
        "model=module", "model._target_=keeping.Keeping", f"model.way='{way}'", f"model.hides={hides}", "model.path=.",
        f"device_map={{embed: disk, hidden: disk, head: disk, seen: {where}}}", "max_memory.cpu=5MB",
        f"generate.prompts={prompts}", "generate.max_new_tokens=4", "hardware.rates={storage: 10MB, host: 10GB}",
    ]  # fmt: skip
    wanted = []
    for prompt in prompts:
        model, tokens = copy.deepcopy(plain), torch.tensor([prompt])
        for _ in range(4):
            with torch.no_grad():
                tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
        wanted.append(tokens[0, len(prompt) :].tolist())
    assert wanted[0] != wanted[1]
    assert len(set(wanted[0])) > 1
    for size in ("1", "3", "auto"):
        run = offstage_here(*asked, f"generate.lockstep={size}")
        assert run.code == 0, run.err
        assert run.tokens == wanted
        again = run.record["metrics"].get("batches_begun_again")
        assert again == (4 if way == "in place" and size != "1" and (hides or size == "3") else None)
        if again:
            assert run.record["metrics"]["lockstep"] == 1
            assert "changes 'seen' in place" in run.err


def test_auto_says_how_many_and_a_bad_number_is_refused(offstage_here: Run, lines: Path) -> None:
    rates = "hardware.rates={storage: 10MB, host: 10GB}"
    run = offstage_here(*STREAMED, f"generate.prompts_file={lines}", "generate.lockstep=auto", rates)
    assert run.record["metrics"]["lockstep"] == 5
    assert "5 in lockstep" in run.out
    refused = offstage_here(*STREAMED, "generate.lockstep=0")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "generate.lockstep: 0 is neither a whole number from 1, auto nor null" in refused.err
