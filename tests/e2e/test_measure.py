"""Figures that are measured several times: which repeats a run takes, and what it says of those that it didn't."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.e2e.conftest import Finished

Run = Callable[..., Finished]
NET = """
import itertools
import torch

class {name}(torch.nn.Module):
    calls = itertools.count()  # nobody can give it back what it was, as what is kept in a module is

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(48, 16)
        self.head = torch.nn.Linear(16, 48)

    def forward(self, tokens):
        return self.head(self.embed(tokens)).roll({forgets} * next(self.calls) // 4, -1)
"""


@pytest.fixture
def measured(offstage_here: Run, fresh_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a small model with keys ``measure``: one whose answer is the same each time."""
    fresh_folder.joinpath("measured_nets.py").write_text(
        NET.format(name="Steady", forgets=0) + NET.format(name="Fickle", forgets=1)
    )
    monkeypatch.syspath_prepend(str(fresh_folder))
    folder = fresh_folder / "ckpt"
    folder.mkdir()
    torch.manual_seed(0)
    sizes = {"embed.weight": (48, 16), "head.weight": (48, 16), "head.bias": (48,)}
    save_file({name: torch.randn(size) for name, size in sizes.items()}, folder / "model.safetensors")

    def run(*arguments: str, net: str = "Steady") -> Finished:
        return offstage_here(
            "model=module", f"model._target_=measured_nets.{net}", f"model.path={folder}",
            "max_memory={cpu: 1MB}", "storage.io=direct",
            "generate.prompts=[[5,6,7]]", "generate.max_new_tokens=6", *arguments,
        )  # fmt: skip

    return run


def repeats(run: Finished, *, counting: bool = True) -> list[dict[str, Any]]:
    assert run.code == 0, run.err
    return [repeat for repeat in run.record["repeats"] if repeat["counts"] or not counting]


def origins(run: Finished) -> str:
    """Return ``n`` for each repeat that counts and is new, ``e`` for each that an earlier run took."""
    return "".join("e" if repeat["earlier"] else "n" for repeat in repeats(run))


def test_repeats_that_are_lacking_are_taken_and_none_twice(measured: Run) -> None:
    first = measured("measure.repeats=3")
    assert origins(first) == "nnn"
    again = measured("measure.repeats=3")
    assert (origins(again), again.cached["generate"]) == ("eee", True)
    more = measured("measure.repeats=4")
    assert origins(more) == "eeen"
    assert {stage["name"]: stage["measured"] for stage in more.record["stages"]}["generate"]
    assert origins(measured()) == "eeee", "what is there is used"
    assert first.tokens == again.tokens == more.tokens
    seconds = sorted(repeat["metrics"]["decode_seconds_per_token"] for repeat in repeats(first))
    assert first.record["metrics"]["decode_seconds_per_token"] == seconds[1]
    base = first.record["metrics"]["base_host_bytes"]
    assert 0 < base <= first.record["memory"]["measured"]["cpu"]
    assert again.record["metrics"]["base_host_bytes"] == base, "as old as the peak that it is a part of"
    assert "measured, median of 3" in first.out
    assert "measured earlier, median of 3" in again.out
    assert "measured, median of 4, 3 earlier" in more.out


def test_fresh_measures_again_and_keeps_both(measured: Run) -> None:
    first = measured()
    fresh = measured("measure.fresh=true", "measure.repeats=2")
    assert (origins(fresh), fresh.cached["generate"]) == ("nn", True)
    assert [repeat["counts"] for repeat in fresh.record["repeats"]] == [False, True, True]
    assert fresh.record["repeats"][0]["measured"] == repeats(first)[0]["measured"]
    assert origins(measured()) == "eee"


def test_a_warm_up_does_not_count(measured: Run) -> None:
    run = measured("measure.warmup=2", "measure.repeats=2")
    assert [repeat["passes_before"] for repeat in run.record["repeats"]] == [0, 2, 3]
    assert [repeat["counts"] for repeat in run.record["repeats"]] == [False, True, True]


def test_a_sample_says_how_the_machine_was(measured: Run) -> None:
    (repeat,) = repeats(measured())
    assert len(repeat["token_seconds"]) == 5
    assert len(repeat["machine"]["load_average"]) == 3
    assert repeat["machine"]["threads"] == torch.get_num_threads()
    assert repeat["processor"]["wall_seconds"] > sum(repeat["token_seconds"])
    assert repeat["processor"]["cpu_seconds"] > 0
    assert 0 <= repeat["processor"]["taken_share"] <= 1


def test_a_model_whose_answer_changes_is_refused_with_the_token_that_differs(measured: Run) -> None:
    run = measured("measure.repeats=2", net="Fickle")
    assert run.code == 1
    assert "measure.repeats: repeat 2 of 2 gave other tokens" in run.err
    assert "sequence 0, token" in run.err
    assert "Traceback" not in run.err
    assert measured(net="Fickle").code == 0, "the generation itself is kept"


def other_work(stage: str, folder: Path) -> list[str]:
    """Return the arguments by which ``stage`` does something with three tokens."""
    given = folder / "given.safetensors"
    save_file({"tokens": torch.tensor([[5, 6, 7]])}, given)
    return {
        "score": ["stages=score", "score.texts=[[5,6,7]]"],
        "forward": ["stages=forward", f"forward.inputs={given}"],
    }[stage]


@pytest.mark.parametrize(("stage", "seconds"), [("score", "score_seconds"), ("forward", "forward_seconds")])
def test_scores_and_forwards_are_measured_as_generations_are(
    stage: str, seconds: str, measured: Run, fresh_folder: Path
) -> None:
    work = other_work(stage, fresh_folder)
    first = measured(*work, "measure.repeats=3", "measure.warmup=1")
    assert [repeat["passes_before"] for repeat in first.record["repeats"]] == [0, 1, 2, 3]
    assert origins(first) == "nnn"
    times = sorted(repeat["metrics"][seconds] for repeat in repeats(first))
    assert first.record["metrics"][seconds] == times[1]
    assert "measured, median of 3" in first.out
    more = measured(*work, "measure.repeats=5")
    assert (origins(more), more.cached[stage]) == ("eeeen", True)
    assert more.record["outputs"] == first.record["outputs"]
    assert origins(measured(*work, "measure.fresh=true")) == "n"


@pytest.mark.parametrize(("stage", "results"), [("score", "scores"), ("forward", "outputs")])
def test_a_model_whose_scores_or_outputs_change_is_refused(
    stage: str, results: str, measured: Run, fresh_folder: Path
) -> None:
    run = measured(*other_work(stage, fresh_folder), "measure.repeats=9", net="Fickle")
    assert run.code == 1
    assert f"gave other {results} than there were before" in run.err
    assert "(output 0, " in run.err


@pytest.mark.parametrize(("stages", "key"), [("finetune", "repeats=2"), ("plan_only", "warmup=1")])
def test_where_nothing_takes_samples_asking_for_some_is_refused(stages: str, key: str, measured: Run) -> None:
    run = measured(f"stages={stages}", f"measure.{key}")
    assert run.code == 2
    assert f"measure.{key.replace('=', ': ')} asks for repeats, and none of empty_init, plan" in run.err
    assert not run.record["stages"]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("repeats", "0", "0 is no whole number from 1; the default is 1"),
        ("warmup", "-1", "-1 is no whole number from 0; the default is 0"),
        ("repeats", "many", "'many' is no whole number"),
        ("fresh", "yes_please", "is neither true nor false"),
        ("repeat", "3", "unknown key (did you mean 'repeats'?)"),
    ],
)
def test_values_that_mean_nothing_are_refused(key: str, value: str, words: str, measured: Run) -> None:
    run = measured(f"+measure.{key}={value}" if key == "repeat" else f"measure.{key}={value}")
    assert run.code == 2
    assert f"measure.{key}: " in run.err
    assert words in run.err


@pytest.mark.long_form
def test_samples_are_artifacts_like_others(measured: Run, fresh_folder: Path) -> None:
    measured("measure.repeats=2")
    (folder,) = fresh_folder.glob("outputs/cache/repeats/*/")
    assert json.loads(folder.joinpath("repeat.json").read_text())["passes_before"] == 1
    folder.joinpath("repeat.json").write_text("{}")
    assert origins(measured("measure.repeats=2")) == "en", "one that was damaged is taken again"
