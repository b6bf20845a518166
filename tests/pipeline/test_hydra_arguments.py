"""Arguments before Hydra sees them: overrides stand together, wherever they were typed."""

from __future__ import annotations

import pytest

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.hydra_arguments import gather_overrides, refuse_arguments


@pytest.mark.parametrize(
    ("given", "gathered"),
    [
        (["a=1", "--config-dir", "c", "b=2"], ["a=1", "b=2", "--config-dir", "c"]),
        (["a=1", "-m", "b=2", "--config-name=x", "a=3"], ["a=1", "b=2", "a=3", "-m", "--config-name=x"]),
        (["a=1", "-cd", "b=2", "~c"], ["a=1", "~c", "-cd", "b=2"]),
        (["-m", "--config-dir", "c", "a=1", "b=2"], ["-m", "--config-dir", "c", "a=1", "b=2"]),
        (["a=1", "b=2"], ["a=1", "b=2"]),
        (["a=1", "--config-dir"], ["a=1", "--config-dir"]),
    ],
)
def test_overrides_on_both_sides_of_an_option_are_all_taken(given: list[str], gathered: list[str]) -> None:
    assert gather_overrides(given) == gathered


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--config-dir"], "argument --config-dir/-cd: expected one argument; offstage --hydra-help shows the options"),
        (["--cfg", "jobs"], "invalid choice: 'jobs'"),
        (["--seed=1", "--dtyp", "x=1"], "--seed=1: no such option; a key of the config has no dashes: seed=1; "),
        (["--experiment", "memory_sweep"], "--experiment: no such option; "),
    ],
)
def test_what_is_no_option_is_told_without_a_page_of_usage(given: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_arguments(given)
    assert words in str(refused.value)
    assert str(refused.value).count("\n") == (1 if "--dtyp" in given else 0)
