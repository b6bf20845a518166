"""The state of a training on disk: what is brought back is what was saved, or nothing is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offstage.pipeline.cache.sealed_files import write_sealed
from offstage.stages.finetune.training_state import POINTER, TrainingState

STEPS = 8


def training(folder: Path, *, steps: int = STEPS, rows: int = 3) -> tuple[TrainingState, Any, torch.optim.Optimizer]:
    """Return the state of a training that has taken one step, its weight and its optimizer."""
    weight = torch.nn.Parameter(torch.randn(rows, 5))
    optimizer = torch.optim.AdamW([weight], foreach=False)
    weight.square().sum().backward()
    optimizer.step()
    return TrainingState(folder, {"weight": weight}, optimizer, steps=steps), weight, optimizer


def test_what_is_brought_back_is_what_was_saved(tmp_path: Path) -> None:
    state, weight, optimizer = training(tmp_path)
    state.save(4)
    again, fresh, other = training(tmp_path)
    assert again.load(range(6)) == 4
    assert torch.equal(fresh, weight)
    assert all(torch.equal(other.state[fresh][kind], value) for kind, value in optimizer.state[weight].items())


def test_after_the_last_step_it_is_the_weights_alone(tmp_path: Path) -> None:
    state, weight, _ = training(tmp_path)
    state.save(4)
    state.save(STEPS)
    (file,) = tmp_path.glob("state-*")
    assert file.stat().st_size < 2 * weight.nbytes + 100
    again, fresh, _ = training(tmp_path)
    assert again.load(range(STEPS)) == STEPS
    assert torch.equal(fresh, weight)


def flip(folder: Path) -> None:
    (file,) = folder.glob("state-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def other_step(folder: Path) -> None:
    pointer = folder / POINTER
    pointer.write_text(pointer.read_text().replace('"step": 4', '"step": 6'))


def beyond(folder: Path) -> None:
    pointer = folder / POINTER
    write_sealed(pointer, {**json.loads(pointer.read_text())["content"], "step": STEPS + 1})


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flip,
    "another step": other_step,
    "a step beyond the last": beyond,
    "an empty file": lambda folder: (folder / POINTER).write_text(""),
    "lost weights": lambda folder: next(folder.glob("state-*")).unlink(),
    "a folder": lambda folder: ((folder / POINTER).unlink(), (folder / POINTER).mkdir()),
    "other weights": lambda folder: training(folder, rows=4)[0].save(4),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_state_that_is_not_what_was_saved_is_set_aside(
    tmp_path: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    training(tmp_path)[0].save(4)
    damage(tmp_path)
    again, fresh, _ = training(tmp_path)
    before = fresh.detach().clone()
    assert again.load(range(STEPS)) == 0
    assert torch.equal(fresh, before)
    assert "set aside" in caplog.text
    assert again.load(range(STEPS)) == 0


def test_a_state_whose_steps_cannot_be_told_any_more_is_set_aside(tmp_path: Path) -> None:
    state, _, _ = training(tmp_path)
    state.save(4)
    assert state.load({0, 1, 3}) == 0
