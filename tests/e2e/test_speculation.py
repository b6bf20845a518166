"""``generate.speculation``: guessed tokens cost passes and change no word; the record tells what came of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.benchmarks.speculation_lockstep import ASSISTED, LOOKED_UP, MODELS, PLAIN, prepare, run
from tests.e2e.conftest import Finished
from tests.long_form import in_ci

Run = Callable[..., Finished]
ASKED = (
    "generate.prompts=['0, 0, 0, 0, 0, 0, 0,',{prompt: Once upon a time, seed: 3}]",
    "hardware.rates={storage: 10MB, host: 10GB, host_to_device: 10GB, device: 10GB}",
    "max_memory.cpu=1500kB", "storage.io=direct", "generate.max_new_tokens=12", "generate.output_logprobs=true",
    "generate.repetition_penalty=0.6",
)  # fmt: skip
"""Words that came before are likelier, so that some guesses are right whatever a processor's kernels round to."""
LOOKUP = "generate.prompt_lookup_num_tokens=4"


def test_tokens_are_those_of_plain_decoding_in_fewer_passes(offstage_here: Run) -> None:
    plain, guessed = offstage_here(*ASKED, "generate.lockstep=1"), offstage_here(*ASKED, LOOKUP)
    assert guessed.code == 0, guessed.err
    assert guessed.tokens == plain.tokens
    scores = [[output["logprobs"] for output in run.record["outputs"]] for run in (plain, guessed)]
    assert scores[0] == scores[1]
    mine, theirs = guessed.record["metrics"], plain.record["metrics"]
    tokens = sum(map(len, guessed.tokens))
    assert mine["speculation"] == "exact"
    assert mine["passes"] == tokens - mine["accepted_tokens"] < tokens
    assert mine["tokens_per_pass"] == tokens / mine["passes"]
    assert mine["draft_acceptance"] == mine["accepted_tokens"] / mine["drafted_tokens"]
    assert mine["streamed_bytes_per_token"] < theirs["streamed_bytes_per_token"]
    assert mine["predicted_forwards_for_free"] > 2
    assert "tokens a pass" in guessed.out
    assert not {"speculation", "passes"} & theirs.keys()
    batched = offstage_here(*ASKED, LOOKUP, "generate.speculation=batched")
    assert not batched.cached["generate"]
    assert batched.record["metrics"]["speculation"] == "batched"
    assert batched.record["metrics"]["tokens_per_pass"] > 1
    assert ["verified in one forward" in run.out for run in (guessed, batched)] == [False, True]


@pytest.mark.parametrize("name", in_ci("mistral", of=MODELS))
def test_prompts_in_lockstep_guess_and_have_the_tokens_that_they_have_alone(name: str, fresh_folder: Path) -> None:
    """Of 50 prompts the benchmark shows it."""
    ways = prepare(name, fresh_folder, 3, tokens=8)
    plain = run(fresh_folder, *ways[PLAIN], "generate.lockstep=1")
    for way in (LOOKED_UP, ASSISTED):
        together = run(fresh_folder, *ways[way], "generate.lockstep=3")
        assert together.count_same(plain) == 3, way
        metrics = together.metrics
        assert metrics["tokens_per_pass"] == plain.tokens / metrics["passes"] >= 3, "what 3 share, and guesses beside"
        assert metrics["accepted_tokens"] > 0


def test_what_does_not_go_together_is_refused(offstage_here: Run) -> None:
    for argument, words in {
        "generate.speculation=both": "generate.speculation: 'both' is none of exact, batched",
    }.items():
        refused = offstage_here(*ASKED, LOOKUP, argument)
        assert (refused.code, refused.err.count("\n")) == (2, 1)
        assert words in refused.err
