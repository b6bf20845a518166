"""The blocks of Python on the pages, each as it stands there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, ResNetConfig, ResNetModel

import offstage
from tests.pages import OF_NOW, ROOT, blocks

TINY = ROOT / "conf/checkpoints/tiny"
CHECKPOINT = "/ckpt/llama"
"""What the pages call a reader's checkpoint."""
RUN_BY = {"API.md": "test_api_page.py", "SERVING.md": "test_server.py", "EXTENDING.md": "test_foreign_stage.py"}
"""The tests that run the blocks of other pages."""
EXAMPLES = [(page.name, text) for page in OF_NOW if page.name not in RUN_BY for text in blocks(page, "python")]


def prompts() -> dict[str, Any]:
    """Return a loaded model, and prompts of it as token ids."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids = [tokenizer(text, return_tensors="pt").input_ids for text in ("Once upon a time", "The end of")]
    return {"offstage": offstage, "loaded": offstage.load(TINY, max_memory={"cpu": "3MB"}), "prompts": ids}


def training() -> dict[str, Any]:
    """Return a small ResNet in training, and three batches of images."""
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    return {"model": ResNetModel(config).train(), "batches": [torch.randn(2, 3, 32, 32) for _ in range(3)]}


GIVEN: Mapping[str, Callable[[], dict[str, Any]]] = {"STREAMING.md": prompts, "TRAINING.md": training}
"""What a block uses that the words around it give."""


@pytest.mark.parametrize(("page", "text"), EXAMPLES, ids=[page for page, _ in EXAMPLES])
def test_an_example_of_a_page_runs(page: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = GIVEN.get(page, dict)()
    exec(text.replace(CHECKPOINT, str(TINY)), names)
    for ids, answer in zip(names.get("prompts", ()), names.get("answers", ()), strict=False):
        assert torch.equal(answer, names["loaded"].model.generate(ids, max_new_tokens=64))
    if "loaded" in names:
        names["loaded"].close()


def test_other_pages_have_theirs_run_by_tests_that_are_there() -> None:
    assert all(list(ROOT.glob(f"tests/**/{test}")) for test in RUN_BY.values())
    assert all(blocks(ROOT / ".github" / page, "python") for page in RUN_BY)
    assert len(EXAMPLES) >= 5
