"""What a record says of the files that its run worked on: each by its content, as sha256sum tells it."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offstage.pipeline.cache.sealed_files import read_sealed
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from tests.e2e.conftest import Finished, environment, records_in

Run = Callable[..., Finished]
EMBEDDED = Path(__file__).parents[2] / "conf" / "checkpoints" / "tiny"
SHORT = ("max_memory.cpu=3MB", "generate.max_new_tokens=2")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the embedded checkpoint that a test may spoil."""
    return Path(shutil.copytree(EMBEDDED, tmp_path / "checkpoint"))


def test_weights_config_tokenizer_and_data_are_told_by_their_content(
    offstage_here: Run, checkpoint: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    done = offstage_here(f"model.path={checkpoint}", *SHORT, f"generate.prompts_file={prompts}")
    assert done.code == 0, done.err
    inputs = done.record["inputs"]
    assert inputs["config"] == {"config.json": sha256(checkpoint / "config.json")}
    assert inputs["data"] == {"generate.prompts_file": sha256(prompts)}
    assert inputs["tokenizer"]["checkpoint"]["tokenizer.json"] == sha256(checkpoint / "tokenizer.json")
    weights, opened = inputs["weights"], open_checkpoint(checkpoint)
    assert (weights["verify"], weights["hub"]) == ("headers", None)
    assert weights["index"] == sha256(checkpoint / "model.safetensors.index.json")
    assert [(file["name"], file["size"], file["sha256"]) for file in weights["files"]] == [
        (file.name, file.size, None) for file in opened.files
    ]
    (path,) = tmp_path.glob("outputs/runs/*/*/weights.json")
    tensors = {name: entry for entries in read_sealed(path).values() for name, entry in entries.items()}
    assert {name: (entry[0], tuple(entry[1])) for name, entry in tensors.items()} == {
        name: (entry.dtype, entry.shape) for name, entry in opened.entries.items()
    }


def test_a_snapshot_of_the_hub_is_told_by_id_commit_and_the_names_of_its_blobs(
    offstage_here: Run, checkpoint: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--who--what" / "snapshots" / "abc123"
    blobs = tmp_path / "models--who--what" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in checkpoint.iterdir():
        blob = blobs / (sha256(path) if path.suffix == ".safetensors" else hashlib.sha1(path.read_bytes()).hexdigest())
        shutil.move(path, blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    done = offstage_here(f"model.path={snapshot}", *SHORT)
    assert done.code == 0, done.err
    weights = done.record["inputs"]["weights"]
    assert weights["hub"] == {"id": "who/what", "revision": "abc123"}
    assert {(file["sha256"], file["sha256_from"]) for file in weights["files"]} == {
        (sha256(path), "hub") for path in snapshot.glob("*.safetensors")
    }
    copied = Path(shutil.copytree(snapshot, tmp_path / "copied"))
    again = offstage_here(f"model.path={copied}", *SHORT)
    assert all(again.cached.values()), "a copy elsewhere is the same checkpoint"


NET = (
    "import torch\n"
    "class Net(torch.nn.Module):\n"
    "    def __init__(self):\n        super().__init__()\n        self.embed = torch.nn.Embedding(48, 16)\n"
    "    def forward(self, input_ids):\n        return self.embed(input_ids)\n"
)


def test_the_code_of_a_module_is_told_by_its_files(offstage_here: Run, tmp_path: Path) -> None:
    code = tmp_path / "net_of_inputs.py"
    code.write_text(NET)
    save_file({"embed.weight": torch.ones(48, 16)}, tmp_path / "model.safetensors")
    asked = ("model=module", "model._target_=net_of_inputs.Net", "model.path=.", "stop_after=shard_load")
    done = offstage_here(*asked)
    assert done.code == 0, done.err
    assert done.record["inputs"]["code"][str(code)] == sha256(code)


def test_a_cached_run_over_files_that_were_touched_looks_again_without_any_model_code(
    offstage_here: Run, checkpoint: Path, tmp_path: Path
) -> None:
    asked = (f"model.path={checkpoint}", *SHORT)
    assert offstage_here(*asked).code == 0
    for path in checkpoint.iterdir():
        os.utime(path)
    code = (
        "import sys\nfrom offstage.pipeline.app import main\ntry:\n    main()\nfinally:\n"
        "    assert not {'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules), sorted(sys.modules)\n"
    )
    command = [sys.executable, "-c", code, *asked]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _, second = sorted(records_in(tmp_path).values(), key=lambda record: str(record["started"]))
    assert all(stage["cached"] for stage in second["stages"])
