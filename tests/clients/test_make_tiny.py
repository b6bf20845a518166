"""The script that made the embedded model makes another one: a narrow one, in a few short steps."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import make_tiny

pytest.importorskip("accelerate", reason="transformers' Trainer needs it")

NARROW = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
LIBRARY = Path(json.__file__).parents[1]


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> list[make_tiny.Document]:
    """What a few modules of the standard library say; one of three is held out."""
    monkeypatch.setattr(make_tiny, "HELD_OUT_SHARE", 3)
    names = ("argparse.py", "logging/__init__.py", "tkinter/__init__.py", "typing.py", "subprocess.py")
    files = tuple(LIBRARY / name for name in names)
    return list(make_tiny.documents([make_tiny.Source("Python", "3", "PSF-2.0", files)]))


def test_a_few_steps_make_a_checkpoint_and_the_same_weights_again(
    tmp_path: Path, corpus: list[make_tiny.Document]
) -> None:
    for name in ("made", "again"):
        make_tiny.make(tmp_path / f"work {name}", tmp_path / name, corpus, steps=6, **NARROW)
    made, again = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("made", "again"))
    assert made == again
    assert b"| Python | 3 | PSF-2.0 |" in made["README.md"]
    model, tokenizer = (kind.from_pretrained(tmp_path / "made") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = tokenizer("Return the number of").input_ids
    assert ids[0] == model.config.bos_token_id
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (model.config.eos_token_id, model.config.pad_token_id)


def test_a_training_that_ended_early_goes_on(tmp_path: Path, corpus: list[make_tiny.Document]) -> None:
    work = tmp_path / "work"
    make_tiny.make(work, tmp_path / "first", corpus, steps=2, **NARROW)
    make_tiny.make(work, tmp_path / "longer", corpus, steps=4, **NARROW)
    kept = json.loads((work / "checkpoint-4" / "trainer_state.json").read_text())
    assert kept["global_step"] == 4
    assert (work / "checkpoint-2").is_dir()
