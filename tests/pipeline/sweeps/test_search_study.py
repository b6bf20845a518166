"""A search by numbers that are made up: what is proposed, what failures are to it, and which job is best."""

from collections.abc import Callable

import pytest

from offstage.pipeline.objective import Limit, Objective
from offstage.pipeline.sweeps.sweep_keys import SAMPLERS

optuna = pytest.importorskip("optuna")
from optuna.distributions import CategoricalDistribution, IntDistribution  # noqa: E402

from offstage.pipeline.sweeps.search import (  # noqa: E402
    Direction,
    SearchSpace,
    SearchStudy,
)
from tests.long_form import in_ci  # noqa: E402

MEGABYTE = 10**6
BUDGETS = SearchSpace({"budget": IntDistribution(300 * MEGABYTE, 2280 * MEGABYTE, step=20 * MEGABYTE)}, ("seed=0",))


def seconds_a_token(budget: float) -> float:
    """What a model of 2.05 GB takes that reads what the budget leaves, and takes 0.155 s to compute."""
    return max(0.155, (2.05e9 - budget) / 2.2e9)


def search(
    came_to: Callable[[int], Objective | None], *, trials: int, sampler: str = "gp", direction: Direction = "minimize",
    at_a_time: int = 1, space: SearchSpace = BUDGETS,
) -> SearchStudy:  # fmt: skip
    study = SearchStudy(space, direction, SAMPLERS[sampler])
    for _ in range(0, trials, at_a_time):
        new = study.propose(at_a_time)
        study.tell({proposal: came_to(int(proposal[-1].partition("=")[2])) for proposal in new})
    return study


@pytest.mark.parametrize("limit", in_ci(0.2, of=[0.2, 0.5]))
def test_ten_trials_find_the_least_budget_that_reaches_a_speed(limit: float) -> None:
    """Budgets under 500 MB hold no plan, and a job with one fails."""

    def run(budget: int) -> Objective | None:
        speed = Limit("seconds", True, limit, seconds_a_token(budget))
        return Objective("budget", budget, (speed,)) if budget >= 500 * MEGABYTE else None

    study = search(run, trials=10)
    best = study.best()
    assert best is not None
    objective = study.tried[best]
    assert objective is not None
    assert 0 <= objective.value - (2.05e9 - limit * 2.2e9) < 20 * MEGABYTE, "no budget of the range is nearer"
    assert best == ("seed=0", f"budget={objective.value}")
    assert len(study.tried) <= 10


def test_a_search_with_the_same_numbers_proposes_the_same_jobs() -> None:
    one, other = (search(lambda budget: Objective("budget", budget), trials=5) for _ in range(2))
    assert one.tried == other.tried


@pytest.mark.parametrize("sampler", list(SAMPLERS))
def test_jobs_that_all_fail_have_no_best_and_end_no_search(sampler: str) -> None:
    study = search(lambda _: None, trials=4, sampler=sampler)
    assert study.best() is None
    assert len(study.tried) >= 1


@pytest.mark.parametrize(("direction", "best_seed"), [("minimize", 1), ("maximize", 3)])
def test_what_is_proposed_again_is_no_job_again(direction: Direction, best_seed: int) -> None:
    three = SearchSpace({"seed": CategoricalDistribution(["1", "2", "3"])}, ())
    study = search(
        lambda seed: Objective("seed", seed), trials=20, at_a_time=4, sampler="random", direction=direction, space=three
    )
    assert sorted(study.tried) == [("seed=1",), ("seed=2",), ("seed=3",)]
    best = study.best()
    assert best == (f"seed={best_seed}",)
