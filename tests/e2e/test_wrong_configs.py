"""Wrong configs, told in whole lines before anything runs: no traceback, no line of Hydra's, nothing half-written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Finished
from tests.e2e.wrong_configs import FOLDER, UNKNOWN_IN_HARDWARE, WRONG_CONFIGS, WrongConfig
from tests.long_form import in_ci


@pytest.mark.parametrize("case", in_ci(*WRONG_CONFIGS[::2], of=WRONG_CONFIGS), ids=lambda case: str(case.name))
def test_a_wrong_config_is_told_by_its_whole_lines(
    case: WrongConfig, offstage_here: Callable[..., Finished], tmp_path: Path
) -> None:
    for name, text in case.files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = offstage_here(*case.arguments)
    lines = [line.replace(str(tmp_path), FOLDER) for line in done.err.splitlines()]
    assert lines == [f"offstage: {line}" for line in case.lines]
    assert (done.code, done.out) == (case.code, "")
    assert [record["status"] for record in done.records] in ([], ["failed"])
    assert not list(tmp_path.glob("outputs/cache/plan/*/manifest.json"))


@pytest.mark.parametrize("case", UNKNOWN_IN_HARDWARE, ids=lambda case: str(case.name))
def test_an_unknown_key_of_hardware_is_a_fault(case: WrongConfig, offstage_here: Callable[..., Finished]) -> None:
    done = offstage_here(*case.arguments, "stop_after=plan")
    assert (done.code, done.err.startswith(f"offstage: {case.lines[0]}")) == (case.code, True), done.err
    assert "unknown" in done.err
