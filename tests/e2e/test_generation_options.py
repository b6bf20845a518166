"""Options that a checkpoint's own defaults ask for: each works, or is refused by its name before a weight is read."""

import json
import shutil
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Finished

Run = Callable[..., Finished]
PROMPT = "generate.prompts=['The weights wait']"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(
        shutil.copytree(str(resources.files("offstage.conf") / "checkpoints" / "tiny"), tmp_path / "checkpoint")
    )


def ask_for(checkpoint: Path, **options: Any) -> None:
    """Have the checkpoint's generation_config.json say ``options`` too."""
    file = checkpoint / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **options}))


def test_stop_strings_end_the_text_from_the_config_and_from_the_checkpoint(
    offstage_here: Run, checkpoint: Path
) -> None:
    given = (f"model.path={checkpoint}", PROMPT, "generate.min_new_tokens=12")
    plain = offstage_here(*given, "generate.max_new_tokens=12")
    text = plain.record["outputs"][0]["text"]
    word = list(dict.fromkeys(text.split()))[3]
    stopped = offstage_here(*given, "generate.max_new_tokens=12", f"generate.stop_strings=['{word}']")
    assert stopped.code == 0, stopped.err
    assert stopped.record["outputs"][0]["text"].rstrip().endswith(word)
    assert len(stopped.tokens[0]) < len(plain.tokens[0])
    ask_for(checkpoint, stop_strings=[word])
    assert offstage_here(*given, "generate.max_new_tokens=12").tokens == stopped.tokens


def test_bad_words_of_the_checkpoint_are_never_said(offstage_here: Run, checkpoint: Path) -> None:
    given = (f"model.path={checkpoint}", PROMPT, "generate.max_new_tokens=6")
    plain = offstage_here(*given)
    ask_for(checkpoint, bad_words_ids=[[plain.tokens[0][0]]])
    barred = offstage_here(*given)
    assert barred.code == 0, barred.err
    assert plain.tokens[0][0] not in barred.tokens[0]


def test_a_static_cache_of_the_checkpoint_gives_the_same_tokens(offstage_here: Run, checkpoint: Path) -> None:
    given = (f"model.path={checkpoint}", PROMPT, "generate.max_new_tokens=4")
    plain = offstage_here(*given)
    ask_for(checkpoint, cache_implementation="static")
    static = offstage_here(*given)
    assert (static.code, static.tokens) == (0, plain.tokens), static.err


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"penalty_alpha": 0.6, "top_k": 4}, "generate.penalty_alpha: 0.6"),
        ({"dola_layers": "high"}, "generate.dola_layers: 'high'"),
        ({"cache_implementation": "quantized", "cache_config": {"nbits": 7}}, "generate.cache_config.nbits: 7"),
        ({"cache_implementation": "offloaded_static"}, "generate.cache_implementation: 'offloaded_static'"),
        ({"bad_words_ids": []}, "generate: transformers refuses these options"),
        ({"bad_words_ids": [5]}, "generate: transformers refuses these options"),
        ({"bad_words_ids": [["a"]]}, "generate: transformers refuses these options"),
    ],
)
def test_what_a_run_cannot_serve_is_refused_by_name_before_weights_are_read(
    options: dict[str, Any], name: str, offstage_here: Run, checkpoint: Path, tmp_path: Path
) -> None:
    ask_for(checkpoint, **options)
    refused = offstage_here(f"model.path={checkpoint}", PROMPT, "generate.max_new_tokens=4")
    assert refused.code == 2, refused.err
    assert refused.err.count("\n") == 1
    assert name in refused.err
    assert refused.record["status"] == "failed"
    assert not list(tmp_path.glob("outputs/cache/shard_load/*/manifest.json"))
