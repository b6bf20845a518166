"""``offstage.load``: a checkpoint in, a model that can be called out, by the same way as a run's."""

import copy
import gc
import json
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from transformers import LlamaConfig, LlamaForCausalLM

import offstage
from offstage.pipeline.errors import BudgetError, CheckpointError, ConfigError
from offstage.stages.dispatch.transfer.reading_threads import reader_pool
from offstage.stages.units import format_bytes

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])
OFFLOADED = {
    "device_map": {"cpu_offload_gb": 0.00002},
    "max_memory": {0: "1MB", "cpu": "1MB"},
    "hardware": {"devices": [{"name": "small", "memory": "100MB"}]},
}
ON_DISK = {"": "disk", "model.embed_tokens": "cpu", "model.norm": "cpu"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=3, max_position_embeddings=64, **sizes)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).eval().save_pretrained(folder, max_shard_size="30KB")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that knows the model after the first load."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def plain(checkpoint: Path) -> nn.Module:
    return LlamaForCausalLM.from_pretrained(checkpoint).eval()


def open_files() -> int:
    gc.collect()  # what another test left may hold some
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def load(checkpoint: Path, cache: Path, **options: Any) -> offstage.LoadedModel:
    return offstage.load(checkpoint, cache=cache, max_length=64, **options)


@pytest.mark.parametrize("said", [{"do_sample": True, "temperature": 0.6, "top_k": 5, "eos_token_id": [2, 7]}, None])
def test_it_generates_as_the_checkpoint_says(said: dict[str, Any] | None, checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    (folder / "generation_config.json").unlink()
    if said is not None:
        (folder / "generation_config.json").write_text(json.dumps(said))
    plain: Any = LlamaForCausalLM.from_pretrained(folder).eval()
    with load(folder, tmp_path / "cache", max_memory={"cpu": "60KB"}) as loaded:
        model: Any = loaded.model
        assert said is None or model.generation_config.to_dict() == plain.generation_config.to_dict()
        answers = []
        for each in (plain, model):
            torch.manual_seed(3)
            answers.append(each.generate(TOKENS, max_new_tokens=20))
    assert torch.equal(*answers)


def test_one_whose_checkpoint_names_no_token_to_end_with_is_refused_by_the_file(checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, true]}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id: \[2, True\] is no token"):
        load(folder, tmp_path / "cache")


@pytest.mark.parametrize("io", ["direct", "mmap"])
@pytest.mark.parametrize("placed", [{"device_map": ON_DISK}, {"max_memory": {"cpu": "60KB"}}, OFFLOADED, {}])
def test_it_answers_bit_for_bit_like_the_plain_model(placed, io, checkpoint, plain, cache) -> None:
    with load(checkpoint, cache, storage={"io": io}, **placed) as loaded:
        assert torch.equal(loaded.model(TOKENS).logits, plain(TOKENS).logits)
        expected = plain.generate(TOKENS, max_new_tokens=6, do_sample=False)
        assert torch.equal(loaded.model.generate(TOKENS, max_new_tokens=6, do_sample=False), expected)


def test_the_plan_and_its_predictions_are_at_hand(checkpoint: Path, cache: Path) -> None:
    with load(checkpoint, cache, device_map=ON_DISK) as loaded:
        model, tokenizer = loaded
        assert tokenizer is None, "the folder has none"
        model(TOKENS)
        assert set(loaded.plan.predicted) == {"cpu", "disk"}
        assert loaded.traffic.streamed_bytes == loaded.plan.forecast["streamed_bytes_per_token"] > 0
        assert loaded.device == torch.device("cpu")


def test_what_one_load_worked_out_the_next_one_finds(checkpoint: Path, tmp_path: Path) -> None:
    load(checkpoint, tmp_path, device_map=ON_DISK).close()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    load(checkpoint, tmp_path, device_map=ON_DISK).close()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")} == before


def test_what_was_loaded_says_in_a_few_lines_what_lies_where_after_it_was_closed_too(
    checkpoint: Path, cache: Path
) -> None:
    with load(checkpoint, cache, device_map=ON_DISK) as loaded:
        first, titles, *devices, summary = repr(loaded).splitlines()
        assert first == f"LoadedModel({type(loaded.model).__name__} from {str(checkpoint)!r}, computes on cpu)"
        assert titles.split()[1:3] == ["on", "weights"]
        assert [line.split()[0] for line in devices] == ["cpu", "disk"]
        streamed = format_bytes(loaded.plan.forecast["streamed_bytes_per_token"])
        assert summary.startswith(f"{streamed} streamed a token, ")
        assert all(name in loaded.report() for name in ("lm_head", *devices))
    assert repr(loaded).splitlines()[1:-1] == [titles, *devices]


def test_closing_gives_files_and_threads_back_and_the_model_says_that_it_is_closed(checkpoint, plain, cache) -> None:
    reader_pool().submit(int).result()
    load(checkpoint, cache, device_map=ON_DISK, storage={"io": "direct"}).close()
    files, threads = open_files(), threading.active_count()
    for _ in range(3):
        loaded = load(checkpoint, cache, device_map=ON_DISK, storage={"io": "direct"})
        assert torch.equal(loaded.model(TOKENS).logits, plain(TOKENS).logits)
        loaded.close()
        loaded.close()
    assert open_files() == files
    assert threading.active_count() == threads, "the readers are the process's"
    for use in (lambda: loaded.model(TOKENS), lambda: copy.deepcopy(loaded.model)):
        with pytest.raises(RuntimeError, match="this model was closed"):
            use()
    assert loaded.model.lm_head.half().weight.is_meta, "a part of it is a plain one again"


def test_what_was_loaded_is_neither_pickled_nor_copied(checkpoint: Path, plain: nn.Module, cache: Path) -> None:
    with load(checkpoint, cache, device_map=ON_DISK, storage={"io": "direct"}) as loaded:
        for action in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match="a LoadedModel can't be pickled or copied: it holds threads and open"):
                action(loaded)
        gc.collect()
        assert torch.equal(loaded.model(TOKENS).logits, plain(TOKENS).logits)
    with pytest.raises(RuntimeError, match="this model was closed"):
        pickle.dumps(loaded.model)


def test_a_model_of_which_a_streamed_weight_was_pruned_is_closed(checkpoint: Path, cache: Path) -> None:
    loaded = load(checkpoint, cache, device_map=ON_DISK)
    prune.l1_unstructured(loaded.model.lm_head, "weight", 0.5)
    loaded.close()
    with pytest.raises(RuntimeError, match="this model was closed"):
        loaded.model(TOKENS)


def test_a_model_that_streams_nothing_can_be_used_on(checkpoint: Path, plain: nn.Module, cache: Path) -> None:
    loaded = load(checkpoint, cache)
    loaded.close()
    assert torch.equal(loaded.model(TOKENS).logits, plain(TOKENS).logits)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"device_map": "optimum"}, ConfigError, r"device_map: 'optimum' is no policy"),
        ({"storag": {}}, ConfigError, r"storag: unknown option \(did you mean 'storage'\?\)"),
        ({"strict": "yes"}, ConfigError, "strict: 'yes' is neither true nor false"),
        ({"storage": {"io": "fast"}}, ConfigError, "storage.io: 'fast' is none of"),
        ({"max_memory": {"cpu": "a lot"}}, ConfigError, "max_memory.cpu: 'a lot'"),
        (
            {"max_memory": ["1GB"]},
            ConfigError,
            r"^max_memory: \['1GB'\] names no device; give each its own size, as \{cpu: 1GB",
        ),
        ({"asks": "scoer"}, ConfigError, r"^asks: 'scoer' is none of generate, score \(did you mean 'score'\?\)"),
        ({"batch_size": 0}, ConfigError, "^batch_size: 0 is no count; give a whole number from 1"),
        ({"batch_size": "2"}, ConfigError, "^batch_size: '2' is no count"),
        ({"hosts": 3.5}, ConfigError, r"^hardware\.hosts: 3\.5 names no hosts; give null for one"),
        ({"dtype": torch.int8}, ConfigError, "dtype: 'int8' is none of"),
        ({"max_memory": {"cpu": "1KB"}}, BudgetError, "the least that works is"),
        ({"revision": "v2"}, ConfigError, "model.revision"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(options, error, words, checkpoint, cache) -> None:
    with pytest.raises(error, match=words):
        load(checkpoint, cache, **options)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_length", 10**30, "10{30} is no count; give a whole number from 1 to 16777216"),
        ("cache", 3, "3 is no folder; give the path of one, or null"),
        ("cache", "a\0b", r"'a\\x00b' is no folder"),
    ],
)
def test_so_is_what_has_no_key_of_the_config(name: str, value: object, words: str, checkpoint: Path) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=f"^{name}: {words}"):
        offstage.load(checkpoint, **options)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no folder"):
        load(tmp_path / "nothing", tmp_path)


def test_weights_that_must_be_cast_are_kept_in_the_cache(checkpoint: Path, tmp_path: Path) -> None:
    expected = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()(TOKENS).logits
    for _ in range(2):
        with load(checkpoint, tmp_path, device_map=ON_DISK, dtype=torch.bfloat16) as loaded:
            assert torch.equal(loaded.model(TOKENS).logits, expected)
    (index,) = tmp_path.glob("offload/*/index.json")
    assert "lm_head.weight" in json.loads(index.read_text())
