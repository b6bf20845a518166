"""Config files from elsewhere: an object, or one line that names the file and says what it holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.config_files import parse_config

FILE = Path("somewhere/config.json")


def test_an_object_is_what_it_says() -> None:
    assert parse_config(FILE, b'{"a": [1, null]}') == {"a": [1, None]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b'{"a": "\xff"}', "not JSON"),
        (b"[" * 100_000, "nested more than 100 deep"),
        (b"[1]", "holds list, not a JSON object"),
        (b"null", "holds NoneType, not a JSON object"),
    ],
)
def test_anything_else_is_refused_by_the_files_name(content: bytes, words: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        parse_config(FILE, content)
    said = str(raised.value)
    assert said.startswith(f"{FILE}: ")
    assert words in said
    assert said.endswith("; restore the file")
