"""Outputs that are removed under a run: it says so, and never ends as if all were well."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.cache.store import Store
from offstage.pipeline.run_screen import RunScreen
from offstage.stages.generate.stage import GenerateStage
from tests.e2e.conftest import Finished

Run = Callable[..., Finished]
MOMENTS: dict[str, tuple[type, str]] = {
    "in a stage": (GenerateStage, "build"),
    "after the stages": (Store, "sweep"),
    "after the record was closed": (RunScreen, "finish"),
}


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
def test_outputs_that_are_removed_while_it_runs_are_said(
    moment: tuple[type, str], offstage_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, name = moment
    work = getattr(kind, name)

    def removed(*arguments: Any, **options: Any) -> Any:
        shutil.rmtree(tmp_path / "outputs")
        return work(*arguments, **options)

    monkeypatch.setattr(kind, name, removed)
    done = offstage_here("generate.max_new_tokens=2")
    assert done.code == 5
    assert len(done.err.strip().splitlines()) == 1
    assert "run.json: was removed while the run was at work" in done.err
    assert done.records == []
