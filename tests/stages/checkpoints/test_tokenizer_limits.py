"""A tokenizer that makes a text longer beyond measure is refused before it is loaded; real ones pass."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.tokenizers import check_tokenizer, load_tokenizer
from tests.deadline import deadline
from tests.e2e.pipelines import config_for

TINY = Path(__file__).parents[3] / "conf" / "checkpoints" / "tiny"
DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def save(folder: Path, **parts: Any) -> None:
    content = json.loads((TINY / "tokenizer.json").read_text())
    folder.joinpath("tokenizer.json").write_text(json.dumps({**content, **parts}))


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": sequence(*[DOUBLING] * 40)},
        {"normalizer": sequence(*[sequence(*[DOUBLING] * 10)] * 4)},
        {"decoder": {"type": "Sequence", "decoders": [DOUBLING] * 40}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 10**6}},
        {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "a" * 10**6}},
        {"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}},
        {"normalizer": sequence(*[{"type": "ByteLevel"}] * 40)},
    ],
    ids=["doubling", "nested", "decoder", "anywhere", "nothing", "prepended", "bytes"],
)
def test_a_tokenizer_that_multiplies_text_is_refused(parts: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, **parts)
    with deadline(), pytest.raises(CheckpointError, match="its steps make a text more than"):
        load_tokenizer(ModelSource.of(config_for(tmp_path, tmp_path)["model"]))


def test_steps_as_real_tokenizers_have_them_pass(tmp_path: Path) -> None:
    check_tokenizer(TINY)
    marks = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    precompiled = {"type": "Precompiled", "precompiled_charsmap": ""}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    save(tmp_path, normalizer=sequence(precompiled, marks), pre_tokenizer=metaspace, decoder=metaspace)
    check_tokenizer(tmp_path)
    llama = sequence(
        {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    )
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    save(tmp_path, normalizer=llama, decoder={"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}]})
    check_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '{"normalizer": 3}', '{"normalizer": [[[]]]}'])
def test_what_is_no_tokenizer_at_all_is_left_to_the_library(text: str, tmp_path: Path) -> None:
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    tmp_path.joinpath("tokenizer.json").write_text(text)
    check_tokenizer(tmp_path)
