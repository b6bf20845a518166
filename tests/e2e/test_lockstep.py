"""``generate.lockstep``: prompts share passes of the weights, and each is answered as if it were alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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


def test_what_a_model_keeps_of_one_prompt_no_other_sees(offstage_here: Run, fresh_folder: Path) -> None:
    plain = saved(fresh_folder / "checkpoint", "recurrent_gemma")
    prompts = [[5], [*range(3, 20)], [5]]  # one token alone is added to what is there
    asked = ["model.path=checkpoint", f"generate.prompts={prompts}", "generate.max_new_tokens=2", "generate.exact=true"]
    alone, together = (offstage_here(*asked, f"generate.lockstep={size}").tokens for size in (1, 3))
    assert together == alone
    fresh = plain.generate(torch.tensor([[5]]), max_new_tokens=2, do_sample=False)
    assert alone[0] == alone[2] == fresh[0, 1:].tolist()


def test_auto_says_how_many_and_a_bad_number_is_refused(offstage_here: Run, lines: Path) -> None:
    rates = "hardware.rates={storage: 10MB, host: 10GB}"
    found = offstage_here(*STREAMED, f"generate.prompts_file={lines}", "generate.lockstep=auto", rates)
    assert found.record["metrics"]["lockstep"] == 5
    assert "5 in lockstep" in found.out
    refused = offstage_here(*STREAMED, "generate.lockstep=0")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "generate.lockstep: 0 is neither a whole number from 1, auto nor null" in refused.err
