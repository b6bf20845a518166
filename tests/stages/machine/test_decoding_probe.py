"""How fast the host decodes: measured of a decoder in a process of its own, and kept for the user."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offstage.pipeline.cache.sealed_files import read_sealed, write_sealed
from offstage.stages.machine.decoding_probe import launch_speed, measure, narrow_speed
from offstage.stages.machine.kernels import identity
from offstage.stages.machine.product_probe import OF_FILES, HostWeights
from offstage.stages.machine.rates import (
    DECODING_NAME,
    Rates,
    coarse_rate,
    host_rates,
    local_rates,
)

SPEED = '[{"host": 18000000000, "calls": 12345, "loops": 600}]'


@pytest.fixture(autouse=True)
def _of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr("offstage.stages.machine.processor.SHARED_PART", 9.0)  # whoever else computes, nobody disturbs


def answer(folder: Path, monkeypatch: pytest.MonkeyPatch, printed: str) -> Path:
    """Have the process that is measured print that; return the file with what each was asked, in a line."""
    asked, python = folder / "asked", folder / "python"
    python.write_text(f"#!/bin/sh\necho \"$5\" >> {asked}\nprintf '%s' '{printed}'\n")
    python.chmod(0o755)
    asked.touch()
    monkeypatch.setattr("sys.executable", str(python))
    return asked


def questions(asked: Path) -> list[list[list[str]]]:
    """Return what each process was asked."""
    return [json.loads(line) for line in asked.read_text().splitlines()]


def test_a_decoder_and_its_products_tell_what_is_read_from_what_is_called_and_what_is_around() -> None:
    host, calls, loops = measure("float16", "0", "1", 3).values()
    assert 10**8 < host < 10**12, "bytes a second"
    assert 500 < calls < 10**6
    assert loops <= calls, "what is around a token's layers takes no less than a call"


def test_more_layers_take_as_much_longer_to_be_given_to_an_accelerator() -> None:
    pairs = ((launch_speed("cpu", 4, 4, 3), launch_speed("cpu", 8, 4, 3)) for _ in range(20))  # others disturb some
    assert any(0.5 * few < many < 2 * few for few, many in pairs), "calls a second, of however many"


def test_a_light_models_calls_are_measured_by_this_process_and_its_reading_isn_t(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answer(tmp_path, monkeypatch, SPEED)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    measured = {local_rates(tmp_path / name, None, light=True) for name in ("one", "another")}
    assert torch.equal(torch.rand(3), expected), "a caller's draws are those that they would be"
    (rates,) = measured
    assert rates == replace(Rates(), calls=rates.calls, loops=rates.loops)
    kept = read_sealed(tmp_path / "another" / DECODING_NAME)
    assert [*kept] == [f"narrow decoder beside reading; {identity()}"]
    assert not asked.read_text(), "no process was started"
    assert local_rates(tmp_path / "given", None, light=True, pinned={"calls": 5000}).calls == 5000
    assert not (tmp_path / "given").exists()


def test_calls_take_as_long_in_however_many_layers_and_what_is_around_them_is_apart() -> None:
    pairs = ((narrow_speed(10**10, 1), narrow_speed(10**10, 8)) for _ in range(20))  # others disturb some
    few, many = next(pair for pair in pairs if 0.5 * pair[0]["calls"] < pair[1]["calls"] < 2 * pair[0]["calls"])
    assert max(few["loops"], many["loops"]) < few["calls"]


def test_what_products_take_to_read_is_no_part_of_a_light_models_calls() -> None:
    slowly, fast = (narrow_speed(at) for at in (10**8, 10**12))
    assert slowly["calls"] > 3 * fast["calls"], "by a tenth of the time at the least"


def test_what_was_measured_is_kept_for_the_user_and_taken_over_by_other_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answer(tmp_path, monkeypatch, SPEED)
    for name in ("one", "another"):
        rates = local_rates(tmp_path / name, None)
        assert (rates.host, rates.calls, rates.loops) == tuple(map(coarse_rate, (18 * 10**9, 12345, 600)))
        kept = {f"decoder of bfloat16; {identity()}": {"host": 18 * 10**9, "calls": 12345, "loops": 600}}
        assert read_sealed(tmp_path / name / DECODING_NAME) == kept
    assert questions(asked) == [[["machine.decoding_probe", "bfloat16", "8"]]]


def test_weights_of_another_dtype_or_from_another_place_on_have_figures_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answer(tmp_path, monkeypatch, SPEED)
    for weights in (HostWeights(), HostWeights("float32", aligned=True), HostWeights("float32", aligned=True)):
        local_rates(tmp_path / "one", None, weights=weights)
    kept = read_sealed(tmp_path / "one" / DECODING_NAME)
    assert [*kept] == [f"decoder of {name}; {identity()}" for name in ("bfloat16", "float32, aligned")]
    asked_of = [["machine.decoding_probe", "bfloat16", "8"]], [["machine.decoding_probe", "float32", "0"]]
    assert questions(asked) == [*asked_of]


@pytest.mark.parametrize("printed", ["", "nonsense", "null"])
def test_where_nothing_is_said_the_nominal_rates_stand(
    printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(tmp_path, monkeypatch, printed)
    rates = local_rates(tmp_path / "one", None)
    assert (rates.host, rates.calls) == (Rates().host, Rates().calls)
    assert not list(tmp_path.rglob(DECODING_NAME))


def test_nothing_is_measured_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(tmp_path, monkeypatch, SPEED)
    monkeypatch.setattr("offstage.stages.machine.rates.memory_bytes", lambda: 1 << 62)
    assert local_rates(tmp_path / "one", None) == Rates()
    assert not asked.read_text()


READ = {(64, 64): 100.0, (128, 64): 300.0}


def key(shape: str) -> str:
    return f"product of {shape} of {OF_FILES.name}; {identity()}"


def test_one_rate_stands_for_all_that_is_read_by_the_seconds_of_each_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(tmp_path, monkeypatch, SPEED)
    write_sealed(tmp_path / DECODING_NAME, {key("64x64"): 10**9, key("128x64"): 3 * 10**9})
    assert host_rates(tmp_path, OF_FILES, READ)[0]["host"] == 400 / (100 / 10**9 + 300 / (3 * 10**9))
    assert host_rates(tmp_path, OF_FILES, {})[0]["host"] == 18 * 10**9


def test_a_decoder_and_all_shapes_that_are_not_kept_are_measured_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = '{"64x64": 20000000000, "128x64": 40000000000}'
    asked = answer(tmp_path, monkeypatch, f"{SPEED[:-1]}, {shapes}]")
    host = round(400 / (100 / 20 + 300 / 40) * 10**9)
    for name in ("one", "another"):
        assert host_rates(tmp_path / name, OF_FILES, READ) == ({"host": host, "calls": 12345, "loops": 600}, False)
        kept = read_sealed(tmp_path / name / DECODING_NAME)
        assert (kept.pop(key("64x64")), kept.pop(key("128x64"))) == (20 * 10**9, 40 * 10**9)
        assert [*kept] == [f"decoder of {OF_FILES.name}; {identity()}"]
    decoder, products = ["machine.decoding_probe", "bfloat16", "8"], ["machine.product_probe", "bfloat16", "8"]
    assert questions(asked) == [[decoder, [*products, "64x64", "128x64"]]]
    answer(tmp_path, monkeypatch, '[{"9x9": 10000000000}]')
    assert host_rates(tmp_path / "one", OF_FILES, {(9, 9): 1.0, (64, 64): 1.0})[0]["host"] == round(2 / 0.15 * 10**9)
    assert questions(asked)[1:] == [[[*products, "9x9"]]], "of what was lacking alone"
