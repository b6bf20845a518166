"""What a forward is called with is what its key says: a file that changed meanwhile is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offstage.pipeline.errors import ConfigError
from offstage.stages.calls.arguments import calls
from offstage.stages.calls.options import ForwardOptions, check_options, identity

MODEL = {"kind": "pretrained", "path": str(resources.files("offstage.conf") / "checkpoints" / "tiny")}


def save_tensors(file: Path, ids: list[list[int]]) -> None:
    np.savez(file, input_ids=np.array(ids))


GIVEN: dict[str, tuple[str, Callable[[Path, Any], object], Any, Any]] = {
    "inputs": ("given.npz", save_tensors, [[1, 2]], [[1, 3]]),
    "texts_file": ("given.txt", Path.write_text, "one text", "one other"),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_what_changed_since_its_content_was_taken_is_refused(tmp_path: Path, kind: str) -> None:
    name, write, first, second = GIVEN[kind]
    file = tmp_path / name
    write(file, first)
    given = ForwardOptions(**{kind: str(file)})
    asked = identity(given, values=True)
    (call,) = calls(given, MODEL, asked)
    assert call.arguments["input_ids"].numel() > 1
    write(file, second)
    with pytest.raises(ConfigError, match=f"forward.{kind}: .*{name}' has changed since the run began; run it again"):
        list(calls(given, MODEL, asked))
    (again,) = calls(given, MODEL)
    assert again.arguments["input_ids"].tolist() != call.arguments["input_ids"].tolist()


def test_an_image_that_changed_is_refused(tmp_path: Path) -> None:
    images = pytest.importorskip("PIL.Image")
    config = '{"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 8}, "crop_size": 8}'
    (tmp_path / "preprocessor_config.json").write_text(config)
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    file, model = tmp_path / "image.png", {"kind": "pretrained", "path": str(tmp_path)}
    images.new("RGB", (9, 9)).save(file)
    given = ForwardOptions(images=[str(file)])
    asked = identity(given, values=True)
    assert len(list(calls(given, model, asked))) == 1
    images.new("RGB", (9, 9), (1, 2, 3)).save(file)
    with pytest.raises(ConfigError, match=r"forward.images\[0\]: .* has changed since the run began"):
        list(calls(given, model, asked))


def test_standard_input_is_no_advice_where_it_is_not_read() -> None:
    (fault,) = check_options(ForwardOptions(texts_file="-"))
    assert fault.message.endswith("'-' is no file; give a text file with one text a line, or a .jsonl one")
