"""Only regular files are read, whole and within bounds; whatever else lies there is an error and no wait."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from offstage.pipeline.regular_files import NotRegularError, open_regular, parse_json, read_json, read_regular
from tests.deadline import deadline


def test_a_regular_file_is_read_through_links_too(tmp_path: Path) -> None:
    tmp_path.joinpath("file").write_text('{"a": [1]}')
    tmp_path.joinpath("link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b'{"a": [1]}'
    assert read_json(tmp_path / "link") == {"a": [1]}


@pytest.mark.parametrize("kind", ["folder", "FIFO", "socket", "device"])
def test_nothing_else_is_opened(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    path = Path("it")
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("it")
    else:
        path.symlink_to("/dev/zero")
    with deadline(), pytest.raises(NotRegularError, match="not a regular file"):
        open_regular(path)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_name_that_no_file_can_have_is_an_error_as_of_one_that_is_not_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"embedded null (byte|character)|surrogates not allowed"):
        read_regular(tmp_path / name)


def test_a_file_beyond_measure_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match="larger than the 268435456 bytes"):
        read_regular(path)


def test_a_file_of_the_system_without_an_end_is_not_read(tmp_path: Path) -> None:
    """It is a regular file by its mode, says that it has no bytes, and a read finds ever more of them."""
    with pytest.raises(OSError, match="larger than the 65536 bytes"):
        read_regular(Path("/proc/self/pagemap"), most=2**16)


@pytest.mark.skipif(not os.access("/proc/kmsg", os.R_OK), reason="the kernel's messages are for root")
def test_a_file_of_the_system_that_has_nothing_yet_is_an_error() -> None:
    with deadline(), suppress(OSError):
        for _ in range(100):
            assert isinstance(read_regular(Path("/proc/kmsg")), bytes)


@pytest.mark.parametrize("text", [b"[" * 101 + b"]" * 101, b"[" * 10**6, b'{"a":' * 10**5, b"{", b"\xff", b"", b"1e"])
def test_what_is_no_json_or_nested_too_deep_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_what_is_nested_as_deep_as_allowed_is_read() -> None:
    value = parse_json(b"[" * 100 + b"]" * 100)
    assert str(value) == "[" * 100 + "]" * 100


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no file here that can be opened and not read")
def test_a_read_that_fails_names_its_file() -> None:
    with pytest.raises(OSError, match="'/proc/self/mem'"):
        read_regular(Path("/proc/self/mem"))
