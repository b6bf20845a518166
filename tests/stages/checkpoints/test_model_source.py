"""Where a model lies, by what a config says of it; and a caller's own settings, which loading leaves as they were."""

from __future__ import annotations

from pathlib import Path

import transformers

from offstage.stages.checkpoints.model_source import ModelSource, is_hub_id
from offstage.stages.checkpoints.tokenizers import load_tokenizer
from offstage.stages.empty_init.model import build_model

TINY = Path(__file__).parents[3] / "conf" / "checkpoints" / "tiny"


def test_a_folder_is_its_own_and_a_tokenizer_of_its_own_comes_first(tmp_path: Path) -> None:
    plain = ModelSource.of({"path": str(tmp_path), "tokenizer": None, "revision": None, "kind": "pretrained"})
    assert plain == ModelSource(str(tmp_path))
    assert (plain.folder, plain.text_folder, plain.weights, plain.local_weights) == (tmp_path, tmp_path, tmp_path, [])
    assert (plain.is_on_hub, plain.is_here(weights=True), plain.lacks_weights) == (False, True, False)
    assert plain.fault_offline() is None
    other = ModelSource(str(tmp_path), tokenizer=str(tmp_path / "other"))
    assert other.text_folder == other.tokenizer_folder == tmp_path / "other"


def test_an_id_is_two_plain_names() -> None:
    assert is_hub_id("org/name-1.5_b")
    assert not any(map(is_hub_id, ("/org/name", "org", "org/name/more", "../name", "./name", None, 5)))


def test_how_verbose_transformers_is_stays_the_callers_choice() -> None:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_info()
    try:
        assert load_tokenizer(ModelSource(str(TINY))) is not None
        build_model({"kind": "pretrained", "path": str(TINY)}, "float32")
        assert transformers.logging.get_verbosity() == transformers.logging.INFO
    finally:
        transformers.logging.set_verbosity(before)
