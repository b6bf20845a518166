"""What goes wrong while a model streams: it is said, or it doesn't matter; never a wrong token, never a leak."""

import gc
import os
import random
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.errors import CheckpointError
from tests.e2e.pipelines import dispatched_model
from tests.e2e.test_architectures import save

TOKENS = torch.tensor([[5, 6, 7]])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    save(folder, "llama", torch.float32, safe=True, sharded=True)
    return folder


def streamed(checkpoint: Path, tmp_path: Path, io: str) -> Any:
    """Return a model all of whose weights are streamed through a staging memory that holds one layer."""
    return dispatched_model(
        checkpoint, tmp_path / "outputs", device_map="disk", max_memory={"cpu": "32KB"}, storage={"io": io}
    )


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def weights_onloaded(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.device.type != "meta"}


HARMS = {
    "deleted": lambda path: path.unlink(),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 200),
    "cut to nothing": lambda path: os.truncate(path, 0),
    "replaced": lambda path: Path(shutil.copy(path, path.with_suffix(".new"))).replace(path),
    "written into": lambda path: path.write_bytes(path.read_bytes()[:-8] + b"\1" * 8),
}


@pytest.mark.parametrize("io", ["direct", "mmap"])
@pytest.mark.parametrize("harm", HARMS)
def test_a_shard_that_changes_between_tokens_never_gives_a_wrong_token(
    harm: str, io: str, checkpoint: Path, tmp_path: Path
) -> None:
    model = streamed(checkpoint, tmp_path, io)
    expected = logits(model)
    for shard in checkpoint.glob("*.safetensors"):
        HARMS[harm](shard)
    if harm in ("deleted", "replaced"):  # what was opened is still there
        assert torch.equal(logits(model), expected)
        return
    with pytest.raises(CheckpointError, match="changed while it was being served"):
        logits(model)


def test_exceptions_thrown_anywhere_leave_the_model_callable(checkpoint: Path, tmp_path: Path) -> None:
    model = streamed(checkpoint, tmp_path, "direct")
    expected, idle = logits(model), weights_onloaded(model)
    modules, chance = [m for m in model.modules() if m is not model], random.Random(1)

    def fail(_module: Any, *_: Any) -> None:
        raise ArithmeticError("thrown")

    for _ in range(200):
        victim = chance.choice(modules)
        register = victim.register_forward_pre_hook if chance.random() < 0.5 else victim.register_forward_hook
        handle = register(fail)
        try:
            logits(model)
        except ArithmeticError:
            pass
        finally:
            handle.remove()
        assert weights_onloaded(model) == idle
    assert torch.equal(logits(model), expected)


def test_a_thousand_generations_leave_memory_and_files_as_they_were(checkpoint: Path, tmp_path: Path) -> None:
    model, process = streamed(checkpoint, tmp_path, "direct"), psutil.Process()

    def generate(times: int) -> tuple[int, int]:
        for _ in range(times):
            model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=2, do_sample=False)
        gc.collect()
        memory = process.memory_info()
        return memory.rss - memory.shared, process.num_fds()

    warm_memory, warm_files = generate(200)
    memory, files = generate(800)
    assert files == warm_files
    assert memory - warm_memory < 8 * 2**20


def test_letting_go_of_the_model_closes_its_files(checkpoint: Path, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    logits(plain)
    gc.collect()
    before = psutil.Process().num_fds()
    model = streamed(checkpoint, tmp_path, "direct")
    logits(model)
    assert psutil.Process().num_fds() > before
    del model
    gc.collect()
    assert psutil.Process().num_fds() == before
