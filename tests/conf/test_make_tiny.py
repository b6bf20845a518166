"""The embedded model is what its script makes, and what transformers loads."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from conf.checkpoints import make_tiny

COMMITTED = Path(make_tiny.__file__).parent / "tiny"
PROMPT = "The stage manager raised her hand and"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request may leave the machine, whatever transformers would like to ask the Hub."""
    monkeypatch.setattr("socket.socket.connect", _refuse)


def _refuse(*_: object) -> None:
    raise OSError("the embedded model must load offline")


def test_made_again_it_has_the_same_bytes(tmp_path: Path) -> None:
    make_tiny.main(["--out", str(tmp_path / "tiny")])
    made = {path.name: path.read_bytes() for path in (tmp_path / "tiny").iterdir()}
    committed = {path.name: path.read_bytes() for path in COMMITTED.iterdir()}
    assert made.keys() == committed.keys()
    assert [name for name in made if made[name] != committed[name]] == []


def test_it_is_small_and_sharded() -> None:
    shards = sorted(COMMITTED.glob("*.safetensors"))
    assert len(shards) >= 3
    assert sum(path.stat().st_size for path in COMMITTED.iterdir()) <= 5_000_000


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


@pytest.mark.parametrize("value", [1.0, -0.1, 1 / 3, 1.00390625, 1.01171875, 65504.0, 0.0])
def test_rounding_is_that_of_torch(value: float) -> None:
    bits = make_tiny.to_bfloat16(np.array([value]))
    assert torch.from_numpy(bits).view(torch.bfloat16).item() == torch.tensor(value).bfloat16().item()


def test_values_spread_as_normal_ones_do() -> None:
    values = make_tiny.draw_normal(np.random.RandomState(0), (100_000,))
    assert abs(values.mean()) < 0.01
    assert abs(values.std() - 1) < 0.01


@pytest.mark.usefixtures("offline")
def test_it_loads_and_speaks(recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = AutoTokenizer.from_pretrained(COMMITTED)
    model = AutoModelForCausalLM.from_pretrained(COMMITTED)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert model.dtype == torch.bfloat16
    assert len(tokens) == 16
    assert len(set(tokens.tolist())) >= 8, "the text shouldn't be one token repeated"
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
    assert len(tokenizer) == make_tiny.VOCABULARY
