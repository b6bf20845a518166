"""What a run shows: on a terminal text as it is made, elsewhere plain lines, and everything once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pipeline.printable_text import printable
from tests.e2e.conftest import finish, records_in, start
from tests.e2e.terminals import Terminal

ENDLESS = ("generate.max_new_tokens=100000", "generate.min_new_tokens=100000")
NEVER = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def record(folder: Path) -> dict[str, Any]:
    return list(records_in(folder).values())[-1]


def text(folder: Path) -> str:
    (output,) = record(folder)["outputs"]
    return printable(output["prompt"] + output["text"])


def test_the_text_is_on_the_terminal_while_it_is_made(tmp_path: Path) -> None:
    prompt = "The weights"
    terminal = Terminal(tmp_path, *ENDLESS, f"generate.prompts=[{prompt}]")
    terminal.read_until(lambda shown: len(shown.partition(prompt)[2]) > 40)
    assert terminal.process.poll() is None
    assert "dispatch" in terminal.shown.partition(prompt)[0], "the stages before stand above it"
    terminal.interrupt()
    assert terminal.finish() == 130
    assert terminal.lines[-2:] == ["offstage: interrupted", ""], "on a line of its own"
    assert terminal.lines[-3].startswith(prompt)
    assert record(tmp_path)["status"] == "interrupted"


def test_a_terminal_ends_with_what_is_printed_elsewhere(tmp_path: Path) -> None:
    terminal, elsewhere = Terminal(tmp_path), tmp_path / "elsewhere"
    assert terminal.finish() == 0
    assert terminal.lines.count(text(tmp_path)) == 1
    assert "…" in terminal.shown, "a stage was announced"
    assert not any("…" in line for line in terminal.lines), "and none is announced any more"
    elsewhere.mkdir()
    plain = finish(start(elsewhere), elsewhere, {})
    assert plain.tokens == [output["token_ids"] for output in record(tmp_path)["outputs"]]
    assert (NEVER.findall(plain.out), plain.err) == ([], "")
    assert plain.out.splitlines().count(text(tmp_path)) == 1


def test_what_is_cached_is_on_the_terminal_at_once(tmp_path: Path) -> None:
    assert finish(start(tmp_path), tmp_path, {}).code == 0
    terminal = Terminal(tmp_path)
    assert terminal.finish() == 0
    assert all(stage["cached"] for stage in record(tmp_path)["stages"])
    assert terminal.lines.count(text(tmp_path)) == 1
    assert any(line.split()[:2] == ["measured", "earlier"] for line in terminal.lines)


def test_whatever_bytes_a_model_says_the_terminal_shows_what_the_record_has(tmp_path: Path) -> None:
    """So hot a model takes any token, among them parts of characters."""
    terminal = Terminal(tmp_path, "generate.do_sample=true", "generate.temperature=9.0", "generate.top_k=0", "seed=3")
    assert terminal.finish() == 0
    assert "\N{REPLACEMENT CHARACTER}" in text(tmp_path)
    assert text(tmp_path) in "\n".join(terminal.lines)


def test_what_is_chosen_from_several_is_shown_in_the_end_with_a_bar_until_then(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "generate.num_beams=2")
    assert terminal.finish() == 0
    assert "generate:" in terminal.shown
    assert not any("generate:" in line for line in terminal.lines), "the bar is gone"
    assert "\n".join(terminal.lines).count(text(tmp_path)) == 1


def test_an_error_stands_alone_on_a_terminal(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "max_memory.cpu=100kB")
    assert terminal.finish() == 4
    line, end = terminal.lines
    assert line.startswith("offstage: max_memory.cpu: ")
    assert end == ""


def test_loading_storing_and_hashing_have_bars_that_are_gone_when_they_are_done(tmp_path: Path) -> None:
    """Another dtype than the checkpoint's has what lies on disk stored before it can stream."""
    terminal = Terminal(tmp_path, "dtype=float32", "verify=full", "check_finite=true", "max_memory.cpu=8MB")
    assert terminal.finish() == 0
    for doing in ("hashing", "offloading", "loading"):
        assert re.search(rf"{doing}: +\d+%.*\d+[kM]?/\d.*B/s\]", terminal.shown), doing
        assert not any(f"{doing}:" in line for line in terminal.lines), doing
    assert terminal.lines.count(text(tmp_path)) == 1
