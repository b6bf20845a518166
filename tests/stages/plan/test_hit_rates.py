"""What runs noted of a checkpoint's hits is what its next plans expect."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offstage.pipeline.cache.fingerprint import fingerprint
from offstage.pipeline.cache.sealed_files import write_sealed
from offstage.pipeline.stage import MEASURED
from offstage.stages.machine.hardware import hardware
from offstage.stages.machine.kernels import NOMINAL
from offstage.stages.machine.rates import Rates
from offstage.stages.plan.expert_slots import Pool, Routing
from offstage.stages.plan.hit_rates import FILE_NAME, is_news, is_share, kept_hit_rates, note_hit_rate
from offstage.stages.plan.inputs import gather_inputs
from tests.stages.plan.mixtures import mixture

POOL = Pool(experts=96, bytes=960, unit_bytes=10)


def checkpoint(folder: Path, size: int = 8) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    folder.joinpath("model.safetensors").write_bytes(bytes(size))
    return {"path": str(folder)}


def test_a_rate_is_expected_again_with_about_as_many_slots(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    assert kept_hit_rates(tmp_path, model) == {}
    note_hit_rate(tmp_path, model, POOL, slots=480, tokens=1, rate=0.8123)
    routing = Routing(1, kept_hit_rates(tmp_path, model))
    assert [routing.measured(POOL, slots) for slots in (480, 490, 600, 960)] == [0.812, 0.812, None, None]


def test_the_first_of_equal_runs_counts(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    for rate in (0.5, 0.6):
        note_hit_rate(tmp_path, model, POOL, slots=480, tokens=1, rate=rate)
    assert list(kept_hit_rates(tmp_path, model).values()) == [0.5]


def test_another_checkpoint_has_rates_of_its_own(tmp_path: Path) -> None:
    first, other = checkpoint(tmp_path / "model"), checkpoint(tmp_path / "other", size=9)
    note_hit_rate(tmp_path, first, POOL, slots=480, tokens=1, rate=0.5)
    assert kept_hit_rates(tmp_path, other) == {}
    os.utime(tmp_path / "model" / "model.safetensors", ns=(0, 0))
    assert kept_hit_rates(tmp_path, first) == {}, "its files were changed"


@pytest.mark.parametrize(("figure", "sound"), [(0, True), (0.5, True), (1, True), (1.5, False), (True, False),
                                               ("1", False), (None, False)])  # fmt: skip
def test_only_shares_are_taken(figure: object, sound: bool) -> None:
    assert is_share(figure) is sound


@pytest.mark.parametrize(("rate", "news"), [(0.89, True), (0.904, False), (0.896, False), (0.95, True), (0.0, True)])
def test_a_rate_is_news_by_the_bytes_that_it_brings(rate: float, news: bool) -> None:
    assert is_news(rate, 0.9, 10**6) is news, "a tenth of the experts is brought: 0.95 is half of the bytes"


def test_what_may_be_chance_is_no_news() -> None:
    assert [is_news(0.87, 0.9, calls) for calls in (100, 800, 1000, 10**6)] == [False, False, True, True]


def test_a_rate_that_is_none_is_passed_over(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    note_hit_rate(tmp_path, model, POOL, slots=480, tokens=1, rate=0.5)
    (key,) = kept_hit_rates(tmp_path, model)
    path = tmp_path / MEASURED / FILE_NAME
    write_sealed(path, {"x " + key: 0.5, "y": 7})
    assert kept_hit_rates(tmp_path, model) == {}


def test_a_plan_depends_on_the_rates_and_the_tokens_of_a_pass() -> None:
    model = mixture("Mixtral")

    def key(prompts: int = 1, rate: float = 0.5) -> str:
        config = {"max_memory": {"cpu": "100kB"}, "generate": {"prompts": prompts * ["hello"], "batch_size": prompts}}
        inputs = gather_inputs(
            model,
            config,
            machine=hardware(config),
            rates=Rates(),
            kernels=NOMINAL,
            hit_rates={"16/32 of 18, 1 a pass": rate},
        )
        return fingerprint([inputs.demands[None].routing, inputs.demands[None].work])

    assert key() == key()
    assert len({key(), key(prompts=2), key(rate=0.75)}) == 3
