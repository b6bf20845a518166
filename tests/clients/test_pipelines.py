"""transformers' own pipelines around a model that streams, whichever function loaded it: the plain one's answers."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, pipeline

import offstage
from tests.clients.doors import Door, cpu_offload, disk_offload, load, make_llama, plain

TINY = Path(__file__).parents[2] / "conf" / "checkpoints" / "tiny"
TEXTS = ["The value", "A list of names that", "It"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = AutoTokenizer.from_pretrained(TINY)
    found.pad_token = found.pad_token or found.eos_token
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    folder = make_llama(tmp_path_factory.mktemp("pipelines") / "llama", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return folder


def from_pretrained(checkpoint: Path) -> Any:
    placed = {"model": "disk", "lm_head": "cpu"}
    cache = checkpoint.with_name("cache")
    return offstage.from_pretrained(checkpoint, device_map=placed, cache=cache, max_length=64)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("door", [load, from_pretrained, cpu_offload, disk_offload])
def test_texts_and_features_are_the_plain_ones(door: Door, batch_size: int, checkpoint: Path, tokenizer: Any) -> None:
    def answers(model: Any) -> tuple[Any, Any]:
        made = pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=batch_size)
        seen = pipeline("feature-extraction", model=model, tokenizer=tokenizer)
        return made(TEXTS, max_new_tokens=6, do_sample=False), seen(TEXTS)

    assert answers(door(checkpoint)) == answers(plain(checkpoint))
