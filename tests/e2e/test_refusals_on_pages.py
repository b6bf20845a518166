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


@pytest.mark.parametrize(("page", "codes"), [("TROUBLESHOOTING.md", [2, 3, 4, 5]), ("BUDGETS.md", [4])])
def test_a_refusal_is_the_one_on_the_page(page: str, codes: list[int], offstage_here: Callable[..., Finished]) -> None:
    shown = SHOWN.findall((PAGES / page).read_text())
    done = [offstage_here(*shlex.split(arguments)) for arguments, _ in shown]
    assert [finished.err.strip() for finished in done] == [line for _, line in shown]
    assert [finished.code for finished in done] == codes
