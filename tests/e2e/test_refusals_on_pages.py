"""What pages show of refusals is what the command says, to the letter, and it exits as the table says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Finished

PAGES = Path(__file__).parents[2] / ".github"
SHOWN = re.compile(r"^\$ offstage (.*)\n(offstage: .*)$", re.MULTILINE)
ROW = re.compile(r"^\| `(.*)`(?: at the root)? \| `(.*)` \|$", re.MULTILINE)
AS_OVERRIDES = {
    "experiment=min": "--config-dir conf experiment=min",
    "hardware.devices: [{memory: 6MB, nam: x}]": "'hardware.devices=[{memory: 6MB, nam: x}]'",
    "hardware.hots: 2": "hardware.hots=2",
    "devices: [{…, rates: {storage: 1GB}}]": "'hardware.devices=[{memory: 6MB, rates: {storage: 1GB}}]'",
    "lab: {disk: 1GB}": "--config-dir conf experiment=mine",
    "${vars.nope}": "'seed=${vars.nope}'",
}
"""What stands in a file in the table of mistakes, as it is given here."""


@pytest.mark.parametrize(("page", "codes"), [("TROUBLESHOOTING.md", [2, 3, 4, 5]), ("BUDGETS.md", [4])])
def test_a_refusal_is_the_one_on_the_page(page: str, codes: list[int], offstage_here: Callable[..., Finished]) -> None:
    shown = SHOWN.findall((PAGES / page).read_text())
    done = [offstage_here(*shlex.split(arguments)) for arguments, _ in shown]
    assert [finished.err.strip() for finished in done] == [line for _, line in shown]
    assert [finished.code for finished in done] == codes


def test_a_mistake_of_the_table_is_answered_as_it_says(
    fresh_folder: Path, offstage_here: Callable[..., Finished]
) -> None:
    experiments = fresh_folder / "conf/experiment"
    experiments.mkdir(parents=True)
    experiments.joinpath("mine.yaml").write_text("# @package _global_\nlab: {disk: 1GB}\n")
    experiments.joinpath("sweep.yaml").write_text("# @package _global_\nseed: 2\n")
    rows = ROW.findall((PAGES / "YAML.md").read_text())
    assert len(rows) == 9
    for mistake, said in rows:
        done = offstage_here(*shlex.split(AS_OVERRIDES.get(mistake, mistake)))
        parts = [re.escape(part.strip()) for part in said.split("…")]
        assert done.code == (3 if mistake.startswith("model.path") else 2), mistake
        assert re.search(".*".join(parts), done.err), (mistake, done.err)
