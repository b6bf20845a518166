"""A tokenizer that trips up its library in Rust: an error like any other, after what Rust itself says."""

import json
import shutil
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

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
def test_a_panic_ends_in_a_line(kind: str, prompt: str, tmp_path: Path, offstage_here: Callable[..., Finished]) -> None:
    changes, words = PANICS[kind]
    folder = Path(
        shutil.copytree(str(resources.files("offstage.conf") / "checkpoints" / "tiny"), tmp_path / "checkpoint")
    )
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    says_a = f"generate.sequence_bias=[[[{json.loads(file.read_text())['model']['vocab']['a']}],1000.0]]"
    done = offstage_here(f"model.path={folder}", f"generate.prompts=['{prompt}']", "generate.max_new_tokens=1", says_a)
    assert done.code == 2, done.err
    last = done.err.splitlines()[-1]
    assert words in last
    assert "PanicException" in last
    assert done.record["status"] == "failed"
