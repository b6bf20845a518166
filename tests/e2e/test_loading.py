"""The keys that say how a checkpoint is checked, and kills while its weights are written, through the command."""

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.e2e.conftest import Finished, start
from tests.e2e.pipelines import dispatched_model

Run = Callable[..., Finished]
Harm = Callable[[dict[str, torch.Tensor]], None]
SHORT = ("max_memory.cpu=2MB", "generate.prompts=[[5,6,7]]", "generate.max_new_tokens=4")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the embedded checkpoint that a test may spoil."""
    return Path(shutil.copytree(str(resources.files("offstage.conf") / "checkpoints" / "tiny"), tmp_path / "ckpt"))


def rewrite(checkpoint: Path, harm: Harm) -> None:
    """Apply ``harm`` to the tensors of the first shard, index included."""
    shard = min(checkpoint.glob("*.safetensors"))
    tensors = load_file(shard)
    harm(tensors)
    with safe_open(shard, "pt") as opened:
        metadata = opened.metadata()
    save_file(tensors, shard, metadata=metadata)
    path = checkpoint / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= dict.fromkeys(tensors, shard.name)
    path.write_text(json.dumps(index))


def add_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.adapter.weight"] = torch.zeros(4)


def put_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[min(tensors)].view(-1)[7] = torch.nan


@pytest.mark.parametrize(
    ("harm", "key", "lax", "strict", "words"),
    [
        (add_tensor, "strict", "false", "true", "model.adapter.weight"),
        (put_nan, "check_finite", "false", "true", "holds NaN or infinity"),
    ],
)
def test_a_check_that_is_switched_off_lets_the_run_pass(
    offstage_here: Run, checkpoint: Path, harm: Harm, key: str, lax: str, strict: str, words: str
) -> None:
    rewrite(checkpoint, harm)
    path = f"model.path={checkpoint}"
    done = offstage_here(path, *SHORT, f"{key}={lax}")
    assert done.code == 0, done.err
    refused = offstage_here(path, *SHORT, f"{key}={strict}")
    assert refused.code == 3, refused.err
    assert words in refused.err
    assert "Traceback" not in refused.err


def test_full_verification_keeps_the_hashes_in_the_artifact(offstage_here: Run, checkpoint: Path) -> None:
    done = offstage_here(f"model.path={checkpoint}", *SHORT, "verify=full")
    assert done.code == 0, done.err
    (artifact,) = (stage["artifact"] for stage in done.record["stages"] if stage["name"] == "shard_load")
    hashes = json.loads((Path(artifact) / "load_report.json").read_text())["sha256"]
    assert hashes.keys() == {shard.name for shard in checkpoint.glob("*.safetensors")}


def test_index_verification_opens_no_shard_until_weights_are_loaded(offstage_here: Run, checkpoint: Path) -> None:
    path = f"model.path={checkpoint}"
    made = offstage_here(path, *SHORT, "verify=index")
    assert made.code == 0, made.err
    shard = min(checkpoint.glob("*.safetensors"))
    before = shard.stat()
    shard.write_bytes(b"x" * before.st_size)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    again = offstage_here(path, *SHORT, "verify=index")
    assert (again.code, again.tokens) == (0, made.tokens), again.err
    for override in ("verify=headers", "verify=index seed=1"):
        refused = offstage_here(path, *SHORT, *override.split())
        assert refused.code == 3, override
        assert shard.name in refused.err
        assert "Traceback" not in refused.err


def test_links_that_leave_the_folder_need_leave(offstage_here: Run, checkpoint: Path, tmp_path: Path) -> None:
    shard = min(checkpoint.glob("*.safetensors"))
    shard.rename(tmp_path / shard.name)
    shard.symlink_to(tmp_path / shard.name)
    path = f"model.path={checkpoint}"
    refused = offstage_here(path, *SHORT)
    assert refused.code == 3
    assert f"{shard}: a symbolic link that leaves the folder; set model.allow_links=true" in refused.err
    done = offstage_here(path, *SHORT, "model.allow_links=true")
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("verify=ful", "did you mean 'full'?"),
        ("strict=1", "strict: 1 is neither true nor false"),
        ("check_finite=maybe", "check_finite: 'maybe'"),
        ("model.allow_links=yes_please", "model.allow_links: 'yes_please'"),
    ],
)
def test_a_check_that_does_not_exist_is_refused(
    offstage_here: Run, checkpoint: Path, override: str, words: str
) -> None:
    done = offstage_here(f"model.path={checkpoint}", override)
    assert done.code == 2
    assert words in done.err


def test_kills_while_the_store_is_written_leave_the_next_run_right(
    offstage_here: Run, checkpoint: Path, tmp_path: Path
) -> None:
    cast = (f"model.path={checkpoint}", *SHORT, "dtype=float16", "device_map=disk")
    expected = offstage_here(*cast).tokens
    shutil.rmtree(tmp_path / "outputs" / "cache")
    chance, cut_short = random.Random(4), []
    for _ in range(2):
        process = start(tmp_path, *cast)
        wait_for_a_tensor(tmp_path, process)
        time.sleep(chance.random() * 0.01)
        process.kill()
        process.communicate()
        cut_short.append(not list(tmp_path.glob("outputs/cache/shard_load/*/manifest.json")))
        shutil.rmtree(tmp_path / "outputs" / "cache" / "generate", ignore_errors=True)
    assert any(cut_short), "no kill hit the load; the test shows nothing"
    done = offstage_here(*cast)
    assert done.code == 0, done.err
    assert done.tokens == expected


def wait_for_a_tensor(folder: Path, process: subprocess.Popen[str]) -> None:
    """Wait until one more tensor is in the offload store, or the process has ended."""
    known = set(folder.glob("outputs/cache/offload/*/*.dat"))
    while process.poll() is None and known >= set(folder.glob("outputs/cache/offload/*/*.dat")):
        time.sleep(0.0005)


def test_a_weight_that_does_not_shrink_is_the_same_under_each_budget_that_shares_a_store_of_copies(
    tmp_path: Path,
) -> None:
    """It rests on disk under one plan, and waits on the host under the next, which has it wait packed."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=6)).bfloat16()
    with torch.no_grad():
        for layer in (0, 3):
            weight = model.model.layers[layer].mlp.up_proj.weight
            signs_and_fractions = torch.randint(0, 2**16, weight.shape) & ~0x7F80
            exponents = torch.randint(0, 168, weight.shape) << 7  # far more of them than weights have
            weight.copy_((signs_and_fractions | exponents).to(torch.int16).view(torch.bfloat16))
    model.save_pretrained(tmp_path / "checkpoint")
    tokens = torch.arange(3, 11)[None]
    storage, hardware = {"io": "direct", "codec": "zstd"}, {"devices": None, "rates": {"storage": "100MB"}}
    with torch.inference_mode():
        wanted = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype="auto")(tokens).logits
        for budget in ("8MB", "14MB", "18MB", "22MB"):
            keys = {"max_memory": {"cpu": budget}, "device_map": "optimal", "storage": storage, "hardware": hardware}
            logits = dispatched_model(tmp_path / "checkpoint", tmp_path / "out", **keys)(tokens).logits
            assert torch.equal(logits, wanted), budget
