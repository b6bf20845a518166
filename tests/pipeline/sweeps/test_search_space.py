"""The sweeps of the command line as what Optuna may propose."""

from typing import Any

import pytest
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.sweeps.search import SearchSpace, read_space

optuna = pytest.importorskip("optuna")
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution  # noqa: E402


def read(*overrides: str) -> SearchSpace:
    with initialize_config_module("offstage.conf", version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        return read_space(overrides, hydra.config_loader)


@pytest.mark.parametrize(
    ("values", "distribution"),
    [
        ("range(10,20,3)", IntDistribution(10, 19, step=3)),
        ("range(20,10,-5)", IntDistribution(15, 20, step=5)),
        ("range(1,2,0.25)", FloatDistribution(1.0, 1.75, step=0.25)),
        ("interval(1,2)", FloatDistribution(1.0, 2.0)),
        ("int(interval(1,20))", IntDistribution(1, 20)),
        ("tag(log,interval(1e-4,1e-1))", FloatDistribution(1e-4, 1e-1, log=True)),
        ("1GB,2GB", CategoricalDistribution(["1GB", "2GB"])),
        ("choice(auto,'a b')", CategoricalDistribution(["auto", r"a\ b"])),
        ("shuffle(range(1,4))", IntDistribution(1, 3)),
    ],
)
def test_each_kind_of_sweep_is_a_distribution(values: str, distribution: Any) -> None:
    assert read(f"key={values}").searched == {"key": distribution}


def test_a_job_has_what_is_fixed_and_what_was_proposed_of_the_later_of_two() -> None:
    space = read("seed=1,2", "dtype=float32", "seed=range(5,9)", "+model.width=3,4")
    trial = optuna.create_study().ask({"seed": IntDistribution(7, 7), "+model.width": CategoricalDistribution(["4"])})
    assert set(space.searched) == {"seed", "+model.width"}
    assert space.proposal(trial) == ("dtype=float32", "seed=7", "+model.width=4")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["seed=1"], "search over nothing"),
        (["seed=range(3,1)", "dtype=a,b"], r"seed: 'range\(3,1\)' has no value"),
        (["seed=interval(5,3)"], r"seed=interval\(5,3\): .*low <= high"),
        (["seed=tag(log,interval(0,3))"], r"seed=tag\(log,interval\(0,3\)\): .*low > 0"),
    ],
)
def test_a_search_over_nothing_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(*overrides)
