"""What a run shows: on a terminal text as it is made, elsewhere plain lines, and everything once."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.plain_data import printable
from tests.e2e.conftest import enter, finish, records_in, start
from tests.e2e.terminals import Terminal

ENDLESS = ("generate.max_new_tokens=100000", "generate.min_new_tokens=100000")
NEVER = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def record(folder: Path) -> dict[str, Any]:
    return list(records_in(folder).values())[-1]


def text(folder: Path) -> str:
    (output,) = record(folder)["outputs"]
    return printable(output["prompt"] + output["text"])


def test_the_text_is_on_the_terminal_while_it_is_made(fresh_folder: Path) -> None:
    prompt = "The weights"
    terminal = Terminal(fresh_folder, *ENDLESS, f"generate.prompts=[{prompt}]")
    terminal.read_until(lambda shown: len(shown.partition(prompt)[2]) > 40)
    assert terminal.process.poll() is None
    assert "dispatch" in terminal.shown.partition(prompt)[0], "the stages before stand above it"
    terminal.interrupt()
    assert terminal.finish() == 130
    assert terminal.lines[-2:] == ["offstage: interrupted", ""], "on a line of its own"
    assert terminal.lines[-3].startswith(prompt)
    assert record(fresh_folder)["status"] == "interrupted"


def test_a_terminal_ends_with_what_is_printed_elsewhere(fresh_folder: Path, described: Path) -> None:
    terminal, elsewhere = Terminal(fresh_folder), fresh_folder / "elsewhere"
    assert terminal.finish() == 0
    assert terminal.lines.count(text(fresh_folder)) == 1
    assert "…" in terminal.shown, "a stage was announced"
    assert not any("…" in line for line in terminal.lines), "and none is announced any more"
    shutil.copytree(described, elsewhere / "outputs/cache")
    plain = finish(start(elsewhere), elsewhere, {})
    assert plain.tokens == [output["token_ids"] for output in record(fresh_folder)["outputs"]]
    assert (NEVER.findall(plain.out), plain.err) == ([], "")
    assert plain.out.splitlines().count(text(fresh_folder)) == 1


def test_what_is_cached_is_on_the_terminal_at_once(fresh_folder: Path) -> None:
    assert enter(fresh_folder) == 0
    terminal = Terminal(fresh_folder)
    assert terminal.finish() == 0
    assert all(stage["cached"] for stage in record(fresh_folder)["stages"])
    assert terminal.lines.count(text(fresh_folder)) == 1
    assert any(line.split()[:2] == ["measured", "earlier"] for line in terminal.lines)


def test_whatever_bytes_a_model_says_the_terminal_shows_what_the_record_has(fresh_folder: Path) -> None:
    """So hot a model takes any token, among them parts of characters."""
    terminal = Terminal(
        fresh_folder, "generate.do_sample=true", "generate.temperature=9.0", "generate.top_k=0", "seed=3"
    )
    assert terminal.finish() == 0
    assert "\N{REPLACEMENT CHARACTER}" in text(fresh_folder)
    assert text(fresh_folder) in "\n".join(terminal.lines)


def test_what_is_chosen_from_several_is_shown_in_the_end_with_a_bar_until_then(fresh_folder: Path) -> None:
    terminal = Terminal(fresh_folder, "generate.num_beams=2")
    assert terminal.finish() == 0
    assert "generate:" in terminal.shown
    assert not any("generate:" in line for line in terminal.lines), "the bar is gone"
    assert "\n".join(terminal.lines).count(text(fresh_folder)) == 1


def test_an_error_stands_alone_on_a_terminal(fresh_folder: Path) -> None:
    terminal = Terminal(fresh_folder, "max_memory.cpu=100kB")
    assert terminal.finish() == 4
    line, end = terminal.lines
    assert line.startswith("offstage: max_memory.cpu: ")
    assert end == ""


@pytest.mark.long_form
def test_loading_storing_and_hashing_have_bars_that_are_gone_when_they_are_done(fresh_folder: Path) -> None:
    """Another dtype than the checkpoint's has what lies on disk stored before it can stream."""
    terminal = Terminal(fresh_folder, "dtype=float32", "verify=full", "check_finite=true", "max_memory.cpu=8MB")
    assert terminal.finish() == 0
    for doing in ("hashing", "offloading", "loading"):
        assert re.search(rf"{doing}: +\d+%.*\d+[kM]?/\d.*B/s\]", terminal.shown), doing
        assert not any(f"{doing}:" in line for line in terminal.lines), doing
    assert terminal.lines.count(text(fresh_folder)) == 1
