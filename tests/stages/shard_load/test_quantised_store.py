"""The store of a checkpoint that is quantised: made once, whatever kills the run that makes it, and checked."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import offstage
from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints import quantised_copy
from tests.e2e.quantised_twins import plain_tensors, save_plain
from tests.long_form import in_ci
from tests.stages.shard_load.test_offload_store import flipped

HARDWARE = {"devices": [], "rates": {"storage": "1GB", "host": "10GB", "dequantising": "1GB"}}
TOKENS = torch.tensor([[5, 66, 100, 33, 20, 7, 8]])


def logits(checkpoint: Path, cache: Path, **options: Any) -> torch.Tensor:
    given = {"quantize": "q8_0", "device_map": {"": "disk"}, "max_length": 32, **options}
    with offstage.load(checkpoint, cache=cache, hardware=HARDWARE, **given) as loaded, torch.no_grad():
        result: torch.Tensor = loaded.model(input_ids=TOKENS).logits
    return result


def store_files(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(folder.rglob("*.dat"))}


KILLED = f"""
import os, signal, sys
import offstage
from offstage.stages.shard_load.offload_store import OffloadStore

publish, left = OffloadStore.publish, [2]

def publish_and_die(store):
    publish(store)
    left[0] -= 1
    if left[0] == 0:  # in the midst of the next file
        put = OffloadStore.put

        def dying(self, name, tensor, pieces):
            def some():
                yield next(pieces)
                yield next(pieces)
                os.kill(os.getpid(), signal.SIGKILL)
            put(self, name, tensor, some())
        OffloadStore.put = dying

OffloadStore.publish = publish_and_die
offstage.load(sys.argv[1], cache=sys.argv[2], quantize="q8_0", device_map={{"": "disk"}}, hardware={HARDWARE})
"""


def test_a_run_that_was_killed_is_gone_on_with_where_it_was(tmp_path: Path) -> None:
    source, cache = save_plain(tmp_path / "plain", "llama"), tmp_path / "cache"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(source), str(cache)], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = store_files(cache)
    assert len(before) == 2
    again = logits(source, cache)
    after = store_files(cache)
    assert len(after) > 3
    assert {name: after[name] for name in before} == before, "what was whole is not made again"
    assert torch.equal(again, logits(source, tmp_path / "other"))
    other = store_files(tmp_path / "other")
    assert {name: data for name, (_, data) in after.items()} == {name: data for name, (_, data) in other.items()}


PEAK = """
import sys
from pathlib import Path
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.quantised_copy import with_copy
from offstage.stages.shard_load.offload_store import open_store
from offstage.stages.shard_load.quantised_store import fill_copy

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

def fill(folder):
    checkpoint = open_checkpoint(Path(folder))
    planned = with_copy(checkpoint, checkpoint.entries, set(checkpoint.entries), sys.argv[3])
    fill_copy(planned, planned.copy.files, open_store(Path(folder) / sys.argv[3], "key"))

fill(sys.argv[1])
before = peak()
fill(sys.argv[2])
print(peak() - before)
"""


@pytest.mark.parametrize("kind", in_ci("q8_0", of=["q8_0", "fp8"]))
def test_memory_is_that_of_a_few_bands_however_large_a_weight(kind: str, tmp_path: Path) -> None:
    for name, rows in (("small", 128), ("large", 2**14)):
        (tmp_path / name).mkdir()
        weight = torch.ones(rows, 2**12, dtype=torch.bfloat16)
        save_file({"w": weight}, tmp_path / name / "model.safetensors")
    command = [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "large"), kind]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 60 * 2**20 < weight.nbytes / 2


def test_a_second_run_quantises_nothing_in_any_dtype_and_placement(tmp_path: Path) -> None:
    source, cache = save_plain(tmp_path / "plain", "llama"), tmp_path / "cache"
    logits(source, cache)
    first = store_files(cache)
    for options in ({}, {"dtype": "float32", "device_map": {"": "cpu"}}, {"quantized": {"products": "fused"}}):
        logits(source, cache, **options)
    assert store_files(cache) == first
    logits(source, cache, quantize="fp8")
    assert {name: store_files(cache)[name] for name in first} == first


def test_a_file_is_of_one_shard_and_no_larger_than_it_must_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_plain(tmp_path / "plain", "llama", max_shard_size="10MB")
    whole = logits(source, tmp_path / "cache")
    assert len(store_files(tmp_path / "cache")) == 1
    monkeypatch.setattr(quantised_copy, "PIECE_BYTES", 40_000)
    assert torch.equal(logits(source, tmp_path / "other"), whole)
    files = store_files(tmp_path / "other")
    assert list(files) == [f"model.safetensors.q8_0-{number}.dat" for number in range(len(files))]
    assert len(files) > 4


def test_a_flipped_bit_is_found_and_its_file_alone_made_again(tmp_path: Path) -> None:
    source, cache = save_plain(tmp_path / "plain", "llama"), tmp_path / "cache"
    expected, first = logits(source, cache), store_files(cache)
    name = next(iter(first))
    (path,) = cache.rglob(name)
    flipped(path, 1000)
    assert torch.equal(logits(source, cache, verify="full"), expected)
    again = store_files(cache)
    assert {name: data for name, (_, data) in again.items()} == {name: data for name, (_, data) in first.items()}
    assert [each for each in first if again[each] != first[each]] == [name]


def test_other_weights_are_quantised_anew(tmp_path: Path) -> None:
    source, cache = save_plain(tmp_path / "plain", "llama"), tmp_path / "cache"
    first = logits(source, cache)
    for file in source.glob("*.safetensors"):
        tensors = {name: 1.5 * tensor for name, tensor in plain_tensors(source).items() if name in _names_in(file)}
        save_file(tensors, file, metadata={"format": "pt"})
    others = logits(source, cache)
    assert not torch.equal(others, first)
    assert torch.equal(others, logits(source, tmp_path / "other"))


def _names_in(file: Path) -> set[str]:
    with safe_open(file, "pt") as opened:
        return set(opened.keys())


def test_a_checkpoint_that_is_not_the_models_is_refused_before_any_work(tmp_path: Path) -> None:
    source = save_plain(tmp_path / "plain", "llama")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"9 missing: 'model\.layers\.2"):
        logits(source, tmp_path / "cache")
    assert not store_files(tmp_path)


def test_an_offload_folder_has_the_store(tmp_path: Path) -> None:
    source, cache = save_plain(tmp_path / "plain", "llama"), tmp_path / "cache"
    expected = logits(source, cache)
    folder = tmp_path / "folder"
    assert torch.equal(logits(source, tmp_path / "other", offload_folder=str(folder)), expected)
    assert store_files(folder).keys() == store_files(cache).keys()
    assert not store_files(tmp_path / "other")
