"""Headers of files on the Hub, by ranges: no more of a file than its header, and none of a server's lies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.hub_headers import FILE_NAME, fetch_headers
from offstage.stages.checkpoints.safetensors_header import read_header
from tests.e2e.fake_hub import COMMIT, REPOSITORY, FakeHub, Lie, serving, without_ranges

NAME = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    offered = tmp_path / "offered"
    offered.mkdir()
    save_file({"a": torch.zeros(300, 500), "b": torch.ones(2)}, offered / NAME)
    with serving(offered) as served:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, served.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield served


@pytest.mark.parametrize("names", [[NAME], None], ids=["as an index names it", "by its own name"])
@pytest.mark.parametrize("redirects", [False, True])
def test_a_header_is_fetched_and_nothing_else(
    hub: FakeHub, tmp_path: Path, names: list[str] | None, redirects: bool
) -> None:
    hub.redirects = redirects
    fetch_headers(REPOSITORY, COMMIT, names, tmp_path)
    headers = json.loads((tmp_path / FILE_NAME).read_text())
    raw = hub.files[NAME].read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert headers == {NAME: {"size": len(raw), "header": raw[8 : 8 + length].decode()}}
    assert hub.sent[NAME] == 8 + length
    assert read_header(hub.files[NAME])[1].keys() == {"a", "b"}


def test_one_file_of_another_known_name_is_found(hub: FakeHub, tmp_path: Path) -> None:
    other = "diffusion_pytorch_model.safetensors"
    hub.files = {other: hub.files[NAME]}
    fetch_headers(REPOSITORY, COMMIT, None, tmp_path)
    assert json.loads((tmp_path / FILE_NAME).read_text()).keys() == {other}


def sends_more(_begin: int, _last: int, data: bytes, _headers: dict[str, str]) -> tuple[int, bytes]:
    return 206, data + bytes(10**7)


def sends_less(_begin: int, _last: int, data: bytes, _headers: dict[str, str]) -> tuple[int, bytes]:
    return 206, data[:-1]


def another_range(_begin: int, last: int, data: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    headers["Content-Range"] = f"bytes 3-{last}/{10**6}"
    return 206, data


def endless_header(begin: int, _last: int, data: bytes, _headers: dict[str, str]) -> tuple[int, bytes]:
    return 206, data if begin else (2**62).to_bytes(8, "little")


def no_header(begin: int, _last: int, data: bytes, _headers: dict[str, str]) -> tuple[int, bytes]:
    return 206, b"x" * len(data) if begin else data


def another_size(begin: int, last: int, data: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    if begin:
        headers["Content-Range"] = f"bytes {begin}-{last}/{10**6}"
    return 206, data


LIES: Mapping[str, tuple[Lie, str]] = {
    "whole files for ranges": (without_ranges, "can't be had by ranges (status 200); download it first"),
    "more than was asked for": (sends_more, "came in more"),
    "less than was asked for": (sends_less, "came in fewer"),
    "another range": (another_range, "came as bytes 3-7/1000000"),
    "a header without end": (endless_header, "a header of 4611686018427387904 bytes"),
    "a header that is none": (no_header, "the header is not a JSON object"),
    "a file that grows": (another_size, "and of 1000000 then"),
    "a file that isn't there": (lambda *_: (404, b""), "'org/name' is no folder here, and can't be had from the Hub"),
    "an answer that asks for a password": (lambda *_: (401, b""), "can't be had from the Hub"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_server_lies_of_a_header_is_refused_and_little_of_it_read(
    hub: FakeHub, tmp_path: Path, lie: str
) -> None:
    hub.lie, words = LIES[lie]
    with pytest.raises(CheckpointError, match=re.escape(words)):
        fetch_headers(REPOSITORY, COMMIT, [NAME], tmp_path)
    assert not (tmp_path / FILE_NAME).exists()
