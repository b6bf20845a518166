"""A tokenizer that trips up its library in Rust: one line, and nothing of what Rust says about it."""

import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.errors import ConfigError
from offstage.stages.checkpoints.tokenizers import tokenizing
from tests.e2e.conftest import Finished

LONG = " ".join(["waits"] * 100)
PANICS: dict[str, tuple[dict[str, Any], str]] = {
    "as it is loaded": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}, "holds no tokenizer"),
    "as it encodes": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "can't be made tokens"),
    "as it decodes": (
        {"decoder": {"type": "Strip", "content": "a", "start": 10**6, "stop": 10**6}},
        "can't make text",
    ),
}


@pytest.mark.parametrize("prompt", ["waits", LONG], ids=["a short prompt", "one that the plan counts"])
@pytest.mark.parametrize("kind", PANICS)
def test_a_panic_is_one_line(kind: str, prompt: str, tmp_path: Path, offstage_here: Callable[..., Finished]) -> None:
    changes, words = PANICS[kind]
    folder = Path(
        shutil.copytree(str(resources.files("offstage.conf") / "checkpoints" / "tiny"), tmp_path / "checkpoint")
    )
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    says_a = f"generate.sequence_bias=[[[{json.loads(file.read_text())['model']['vocab']['a']}],1000.0]]"
    done = offstage_here(f"model.path={folder}", f"generate.prompts=['{prompt}']", "generate.max_new_tokens=1", says_a)
    assert done.code == 2, done.err
    assert words in done.err
    assert "PanicException" in done.err
    assert done.err.count("\n") == 1
    assert done.record["status"] == "failed"


def test_what_else_is_said_meanwhile_reaches_the_screen(capfd: pytest.CaptureFixture[str]) -> None:
    def warn_and_fail() -> None:
        with tokenizing(ConfigError, "model.tokenizer"):
            os.write(2, b"a warning\n")
            raise ValueError("no")

    with pytest.raises(ConfigError, match=r"model\.tokenizer: ValueError: no"):
        warn_and_fail()
    assert capfd.readouterr().err == "a warning\n"


def test_without_standard_error_a_tokenizer_works_as_well(capfd: pytest.CaptureFixture[str]) -> None:
    screen = os.dup(2)
    os.close(2)
    try:
        with tokenizing(ConfigError, "model.tokenizer"):
            done = True
    finally:
        os.dup2(screen, 2)
        os.close(screen)
    assert done


def test_threads_that_load_tokenizers_leave_standard_error_as_it_was() -> None:
    before = os.fstat(2).st_ino

    def load(_number: int) -> None:
        with tokenizing(ConfigError, "model.tokenizer"):
            time.sleep(0.002)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(load, range(64)))
    assert os.fstat(2).st_ino == before
