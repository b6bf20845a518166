"""A sweep that searches: what is proposed follows from what the jobs before came to."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from tests.e2e.conftest import Finished

pytest.importorskip("optuna")
Run = Callable[..., Finished]
SEARCH = ("-m", "hydra/sweeper=optuna", "hydra/launcher=basic", "stop_after=plan", "device_map=sequential")
LEAST = ("objective.metric=memory.budget.cpu", "objective.at_most.predicted_streamed_bytes_per_token=5000000")


def results(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("outputs/multirun/*/*/optimization_results.yaml")
    content: dict[str, Any] = json.loads(path.read_text())
    assert OmegaConf.load(path) == content, "it is YAML too"
    return content


@pytest.mark.usefixtures("jobs_fork")
def test_the_least_budget_within_a_limit_is_found_and_can_be_resumed(offstage_here: Run, tmp_path: Path) -> None:
    """One of the budgets is too small for any plan: a job that fails ends no search."""
    search = (*SEARCH, *LEAST, "hydra.sweeper.n_trials=4", "max_memory.cpu=range(1000,5001000,2000000)")
    done = offstage_here(*search)
    budgets = {record["memory"]["budget"].get("cpu"): record for record in done.records if record["stages"]}
    kept = [
        budget
        for budget, record in budgets.items()
        if budget and record["metrics"].get("predicted_streamed_bytes_per_token", math.inf) <= 5e6
    ]
    outcome = results(tmp_path)
    assert outcome["best_value"] == min(kept) == 4001000
    assert outcome["best_params"] == {"max_memory.cpu": "4001000"}
    assert outcome["jobs"] == len(done.records) <= outcome["trials"] == 4, "what is proposed again is no job again"
    assert [record["status"] for record in done.records].count("failed") == 1
    assert f"is job {outcome['best_job']}: memory.budget.cpu 4.00 MB" in done.out
    (folder,) = tmp_path.glob("outputs/multirun/*/*")
    shutil.rmtree(folder / "1")
    resumed = offstage_here(*search, f"hydra.sweep.dir={folder}")
    assert [record["overrides"] for record in resumed.records] == [done.records[1]["overrides"]], "what wasn't done"
    assert results(tmp_path) == outcome


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["seed=1,2"], "objective.metric: a search needs a metric to go by"),
        (["seed=1,2", "objective.metric=generate.speed"], "objective.metric: 'generate.speed' names no number"),
        (["seed=1,2", *LEAST, "dtype=float99"], "dtype: 'float99'"),
        (["seed=1,2", *LEAST, "hydra/launcher=joblib"], "hydra/launcher: 'a.plugin.JoblibLauncher' forgets"),
        (["seed=1,2", *LEAST, "hydra.sweeper.direction=down"], "hydra.sweeper.direction: 'down' is none of"),
        (["seed=1,2", *LEAST, "hydra.sweeper.n_trials=0"], "hydra.sweeper.n_trials: 0 is no number of jobs"),
        (["seed=1", *LEAST], "hydra.sweeper: a search over nothing"),
    ],
)
def test_a_search_that_can_come_to_nothing_is_refused_in_one_line(
    arguments: list[str], words: str, offstage_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    launchers, node = ConfigStore.instance().repo["hydra"]["launcher"], {"_target_": "a.plugin.JoblibLauncher"}
    another = replace(launchers["basic.yaml"], name="joblib.yaml", node=OmegaConf.create(node))
    monkeypatch.setitem(launchers, "joblib.yaml", another)
    done = offstage_here(*SEARCH, *arguments)
    assert (done.code, done.out, done.records) == (2, "", [])
    assert done.err.startswith(f"offstage: {words}")
    assert done.err.count("\n") == 1


@pytest.mark.usefixtures("jobs_fork")
def test_a_number_that_no_job_comes_to_ends_the_search_at_the_first(offstage_here: Run) -> None:
    """The shipped experiment limits the time of a token, and a run that ends with its plan has none."""
    done = offstage_here("experiment=least_budget", "hydra/launcher=basic", "stop_after=plan")
    assert done.code == 2
    assert [record["status"] for record in done.records] == ["completed"]
    assert "objective.at_most: this run's record has no number 'decode_seconds_per_token'" in done.err


@pytest.mark.long_form
@pytest.mark.usefixtures("jobs_fork")
def test_a_job_without_the_number_that_others_have_ends_no_search(offstage_here: Run, tmp_path: Path) -> None:
    """A run of one token has no seconds of decoding: its search goes on with the others."""
    search = ("-m", "hydra/sweeper=optuna", "hydra/launcher=basic", "objective.metric=decode_seconds_per_token")
    lengths = "generate.max_new_tokens=choice(3,1,2)"
    done = offstage_here(*search, "hydra.sweeper.n_trials=3", lengths)
    counts = [record["config"]["generate"]["max_new_tokens"] for record in done.records]
    assert (done.code, counts[0]) == (0, 1)
    assert {record["status"] for record in done.records} == {"completed"}
    assert results(tmp_path)["best_params"]["generate.max_new_tokens"] in ("2", "3")
