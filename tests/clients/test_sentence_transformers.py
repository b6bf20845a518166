"""A SentenceTransformer around a model that streams: its vectors, and adapters that it trains, are the plain one's."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, BertConfig, BertModel

import offstage
from tests.clients.doors import words

peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")
sentence_transformers = pytest.importorskip("sentence_transformers")
modules = pytest.importorskip("sentence_transformers.models")
losses = pytest.importorskip("sentence_transformers.losses")

TEXTS = ["a value", "the function returns a key", "names"]
PAIRS = [{"anchor": f"what is {number}", "positive": f"it is {number}"} for number in range(8)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("sentences") / "bert", words()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(checkpoint: Path) -> Any:
    cache = checkpoint.with_name("cache")
    options: dict[str, Any] = {"class": "BertModel", "device_map": {"": "disk"}, "max_length": 64}
    return offstage.load(checkpoint, cache=cache, **options).model


def load_checkpoint_and_dispatch(checkpoint: Path) -> Any:
    with offstage.init_empty_weights():
        model = BertModel(AutoConfig.from_pretrained(checkpoint))
    return offstage.load_checkpoint_and_dispatch(
        model.eval(), checkpoint, device_map={"": "disk"}, offload_folder=tempfile.mkdtemp(dir=checkpoint.parent)
    )


def disk_offload(checkpoint: Path) -> Any:
    model = BertModel.from_pretrained(checkpoint).eval()
    return offstage.disk_offload(model, tempfile.mkdtemp(dir=checkpoint.parent), "cpu")


DOORS: list[Callable[[Path], Any]] = [load, load_checkpoint_and_dispatch, disk_offload]


def around(checkpoint: Path, model: Any = None) -> Any:
    """Return a SentenceTransformer of the checkpoint, with ``model`` in the place of its own if there is one."""
    words = modules.Transformer(str(checkpoint))
    if model is not None:
        words.auto_model = model
    return sentence_transformers.SentenceTransformer(modules=[words, modules.Pooling(32)], device="cpu")


def learned(sentences: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Return what an adapter has learnt in three steps."""
    torch.manual_seed(1)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["query", "value"]), sentences[0].auto_model)
    for name, value in sentences.named_parameters():
        value.requires_grad_("lora_" in name)
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, learning_rate=0.05, **quiet
    )
    loss = losses.MultipleNegativesRankingLoss(sentences)
    data = datasets.Dataset.from_list(PAIRS)
    sentence_transformers.SentenceTransformerTrainer(sentences, arguments, train_dataset=data, loss=loss).train()
    return {name: value for name, value in sentences.named_parameters() if value.requires_grad}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", DOORS)
def test_it_embeds_and_trains_an_adapter(door: Callable[[Path], Any], checkpoint: Path, tmp_path: Path) -> None:
    sentences = around(checkpoint, door(checkpoint))
    assert (sentences.encode(TEXTS) == around(checkpoint).encode(TEXTS)).all()
    expected, weights = learned(around(checkpoint), tmp_path), learned(sentences, tmp_path)
    assert weights.keys() == expected.keys()
    assert expected
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())
