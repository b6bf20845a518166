"""FIFOs and devices in the place of files: one line or the right answer, and nothing waits."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from functools import cache
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.deadline import deadline
from tests.e2e.conftest import Finished, enter, records_in
from tests.long_form import in_ci

Run = Callable[..., Finished]
Put = Callable[[Path], None]
CONFIG, CHECKPOINT = 2, 3


def put_fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def put_device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


PUTS = {"FIFO": put_fifo, "device": put_device}


@pytest.fixture(params=PUTS)
def put(request: pytest.FixtureRequest) -> Put:
    """Return a function that puts something that isn't a regular file where its argument says."""
    return PUTS[request.param]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a copy of the embedded checkpoint, to be harmed."""
    return Path(shutil.copytree(str(resources.files("offstage.conf") / "checkpoints" / "tiny"), tmp_path / "ckpt"))


def refused(done: Finished, code: int, *words: str) -> None:
    lines = [line for line in done.err.splitlines() if line.startswith("offstage: ")]
    assert (done.code, len(lines)) == (code, 1), done.err
    assert all(word in lines[0] for word in words), lines[0]
    assert "Traceback" not in done.err


FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "model.safetensors",
    "model.safetensors.index.json", "model-00002-of-00004.safetensors", "adapter_config.json",
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"),
    in_ci(
        *product(["FIFO"], FILES), ("device", "config.json"), ("device", "model.safetensors"), of=product(PUTS, FILES)
    ),
)
def test_a_file_of_a_checkpoint_that_is_none_exits_3(
    kind: str, name: str, checkpoint: Path, offstage_here: Run
) -> None:
    PUTS[kind](checkpoint / name)
    with deadline():
        done = offstage_here(f"model.path={checkpoint}", "max_memory.cpu=2MB")
    refused(done, CHECKPOINT, name, "not a regular file")


def test_the_only_weights_file_that_is_none_exits_3(checkpoint: Path, put: Put, offstage_here: Run) -> None:
    for path in checkpoint.glob("model*"):
        path.unlink()
    put(checkpoint / "a.safetensors")
    with deadline():
        done = offstage_here(f"model.path={checkpoint}", "max_memory.cpu=2MB")
    refused(done, CHECKPOINT, "a.safetensors", "not a regular file")


def test_a_stray_one_beside_the_weights_is_not_opened(checkpoint: Path, put: Put, offstage_here: Run) -> None:
    put(checkpoint / "a.safetensors")
    with deadline():
        done = offstage_here(f"model.path={checkpoint}", "max_memory.cpu=2MB", "generate.max_new_tokens=2")
    assert done.code == 0, done.err


def test_a_tokenizer_of_another_folder_that_is_none_exits_3(
    checkpoint: Path, put: Put, offstage_here: Run, tmp_path: Path
) -> None:
    tmp_path.joinpath("tokenizer").mkdir()
    put(tmp_path / "tokenizer" / "tokenizer.json")
    with deadline():
        done = offstage_here(f"model.path={checkpoint}", f"model.tokenizer={tmp_path / 'tokenizer'}")
    refused(done, CHECKPOINT, "model.tokenizer", "not a regular file")


@pytest.mark.parametrize("key", ["generate.prompts_file", "device_map"])
def test_a_file_that_the_config_names_and_that_is_none_exits_2(
    key: str, put: Put, offstage_here: Run, tmp_path: Path
) -> None:
    put(tmp_path / "given.json")
    with deadline():
        done = offstage_here(f"{key}={tmp_path / 'given.json'}")
    refused(done, CONFIG, key, "given.json")


SHORT = ("max_memory.cpu=2MB", "generate.max_new_tokens=2")
STREAMED = ("dtype=float32", "device_map=disk", "generate.max_new_tokens=2")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, described: Path) -> Callable[..., Path]:
    """Return a function that returns the outputs of a run with its arguments, which is made once."""

    @cache
    def run(*arguments: str) -> Path:
        folder = tmp_path_factory.mktemp("finished")
        shutil.copytree(described, folder / "outputs" / "cache")
        assert enter(folder, *arguments) == 0
        return folder / "outputs"

    return run


def finished_in(folder: Path, outputs: Path) -> list[list[int]]:
    """Have ``outputs`` lie in ``folder`` too; return the tokens of the run there."""
    shutil.copytree(outputs, folder / "outputs", dirs_exist_ok=True)
    (record,) = records_in(folder).values()
    return [output["token_ids"] for output in record["outputs"]]


PATTERNS = ["*/*/manifest.json", "*/*/skeleton.json", "*/*/plan.json", "*/*/generation.json", "hardware/*.json"]


@pytest.mark.parametrize(
    ("kind", "pattern"),
    in_ci(
        ("FIFO", "*/*/manifest.json"), ("device", "*/*/skeleton.json"), ("FIFO", "*/*/generation.json"),
        ("device", "hardware/*.json"), of=product(PUTS, PATTERNS),
    ),
)  # fmt: skip
def test_a_file_of_the_cache_that_is_none_is_made_again(
    kind: str, pattern: str, finished: Callable[..., Path], offstage_here: Run, tmp_path: Path
) -> None:
    tokens = finished_in(tmp_path, finished(*SHORT))
    damaged = sorted(tmp_path.glob(f"outputs/cache/{pattern}"))
    for path in damaged:
        PUTS[kind](path)
    assert damaged
    with deadline():
        again, third = offstage_here(*SHORT), offstage_here(*SHORT)
    assert (again.code, third.code) == (0, 0), again.err
    assert again.tokens == third.tokens == tokens
    assert all(third.cached.values())


@pytest.mark.parametrize(
    ("kind", "name"),
    in_ci(
        ("FIFO", "index.json"), ("device", "offstage.json"), ("FIFO", "lm_head.weight.dat"),
        of=product(PUTS, ["index.json", "offstage.json", "lm_head.weight.dat"]),
    ),
)  # fmt: skip
def test_a_file_of_the_offload_store_that_is_none_is_made_again(
    kind: str, name: str, finished: Callable[..., Path], offstage_here: Run, tmp_path: Path
) -> None:
    tokens = finished_in(tmp_path, finished(*STREAMED))
    (path,) = tmp_path.glob(f"outputs/cache/offload/*/{name}")
    PUTS[kind](path)
    shutil.rmtree(tmp_path / "outputs" / "cache" / "generate")
    with deadline():
        again = offstage_here(*STREAMED)
    assert again.code == 0, again.err
    assert again.tokens == tokens


@pytest.mark.parametrize("command", ["replay", "report"])
def test_a_record_that_is_none_is_refused(
    command: str, put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    from offstage.pipeline.replay_command import main as replay
    from offstage.pipeline.report.command import main as report

    monkeypatch.chdir(tmp_path)
    put(tmp_path / "run.json")
    monkeypatch.setattr(sys, "argv", [command, str(tmp_path)])
    with deadline(), pytest.raises(SystemExit) as exit_info:
        replay() if command == "replay" else report()
    text = "".join(capfd.readouterr())
    assert exit_info.value.code in ((2, 5) if command == "replay" else (None, 0)), "a report lists what it can't read"
    assert "not a regular file" in text
    assert "Traceback" not in text
    assert not records_in(tmp_path)
