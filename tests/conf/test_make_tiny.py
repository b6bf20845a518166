"""The embedded model is what its script makes, loads as transformers' own do, and speaks."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from offstage.conf.checkpoints import corpus, make_tiny, training

COMMITTED = Path(make_tiny.__file__).parent / "tiny"
PROMPT = "Return the number of"
STANDARD_LIBRARY = Path(json.__file__).parents[1]
NARROW = {
    "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request may leave the machine, whatever transformers would like to ask the Hub."""
    monkeypatch.setattr("socket.socket.connect", _refuse)


def _refuse(*_: object) -> None:
    raise OSError("the embedded model must load offline")


def make(work: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Make a checkpoint of one narrow layer from a few modules in twenty short steps; return its files."""
    names = ("argparse.py", "logging/__init__.py", "tkinter/__init__.py", "typing.py", "subprocess.py")
    files = tuple(STANDARD_LIBRARY / name for name in names)
    monkeypatch.setattr(corpus, "HELD_OUT_SHARE", 3)
    for name, value in NARROW.items():
        monkeypatch.setitem(make_tiny.MODEL_CONFIG, name, value)
    monkeypatch.setattr(corpus, "installed_sources", lambda: [corpus.Source("Python", "3", "PSF-2.0", files)])
    make_tiny.make(work, folder, training.Recipe(steps=20, rows=2, context=16))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_twenty_steps_make_a_checkpoint_and_the_same_bytes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path / "work", tmp_path / "made", monkeypatch)
    assert made.keys() >= {path.name for path in COMMITTED.iterdir() if path.suffix != ".safetensors"}
    assert b"| Python | 3 | PSF-2.0 |" in made["README.md"]
    again = make(tmp_path / "work again", tmp_path / "again", monkeypatch)
    made.pop("README.md")  # it says how long it took
    assert [name for name in made if made[name] != again[name]] == []
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_it_is_small_and_sharded() -> None:
    shards = sorted(COMMITTED.glob("*.safetensors"))
    assert len(shards) >= 3
    assert sum(path.stat().st_size for path in COMMITTED.iterdir()) <= 8_000_000


def test_the_index_names_every_tensor_where_it_lies() -> None:
    index = json.loads((COMMITTED / "model.safetensors.index.json").read_text())
    found, total = {}, 0
    for path in COMMITTED.glob("*.safetensors"):
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118, since safe_open isn't a mapping
                found[name] = path.name
                total += shard.get_tensor(name).nbytes
    assert found == index["weight_map"]
    assert total == index["metadata"]["total_size"]


@pytest.mark.usefixtures("offline")
def test_it_loads_and_speaks(recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = AutoTokenizer.from_pretrained(COMMITTED)
    model = AutoModelForCausalLM.from_pretrained(COMMITTED)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert model.dtype == torch.bfloat16
    assert len(set(tokens.tolist())) >= 5, "the text shouldn't be one token repeated"
    assert [str(warning.message) for warning in recwarn] == []
    assert caplog.messages == []


@pytest.mark.usefixtures("offline")
def test_the_tokenizer_takes_any_text_and_fills_the_vocabulary() -> None:
    tokenizer = AutoTokenizer.from_pretrained(COMMITTED)
    text = "émigré 汉字\n\t 🎭  x"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert ids[0] == tokenizer.bos_token_id == 0
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2)
    assert len(tokenizer) == json.loads((COMMITTED / "config.json").read_text())["vocab_size"]
