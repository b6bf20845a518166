"""The embedded model loads as transformers' own do, and speaks."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

COMMITTED = Path(__file__).parents[2] / "conf" / "checkpoints" / "tiny"
PROMPT = "Return the number of"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request may leave the machine, whatever transformers would like to ask the Hub."""
    monkeypatch.setattr("socket.socket.connect", _refuse)


def _refuse(*_: object) -> None:
    raise OSError("the embedded model must load offline")


def test_it_is_small_and_sharded() -> None:
    shards = sorted(COMMITTED.glob("*.safetensors"))
    assert len(shards) >= 3
    assert sum(path.stat().st_size for path in COMMITTED.iterdir()) <= 8_000_000


def test_the_index_names_every_tensor_where_it_lies() -> None:
    index = json.loads((COMMITTED / "model.safetensors.index.json").read_text())
    weight_map, total = {}, 0
    for path in COMMITTED.glob("*.safetensors"):
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118, since safe_open isn't a mapping
                weight_map[name] = path.name
                total += shard.get_tensor(name).nbytes
    assert weight_map == index["weight_map"]
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
