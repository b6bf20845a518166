"""What goes wrong while a model streams: it is said, or it doesn't matter; never a wrong token, never a leak."""

import gc
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from offstage.pipeline.errors import CheckpointError
from tests.e2e.conftest import COMMAND, Finished, environment, records_in
from tests.e2e.pipelines import dispatched_model
from tests.e2e.test_architectures import save
from tests.long_form import in_ci

TOKENS = torch.tensor([[5, 6, 7]])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    save(folder, "llama", torch.float32, safe=True, sharded=True)
    return folder


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one folder of outputs: the model is the same in each checkpoint, and need be described once."""
    return tmp_path_factory.mktemp("outputs")


def streamed(checkpoint: Path, outputs: Path, io: str) -> Any:
    """Return a model all of whose weights are streamed through a staging memory that holds one layer."""
    return dispatched_model(checkpoint, outputs, device_map="disk", max_memory={"cpu": "32KB"}, storage={"io": io})


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


@pytest.mark.parametrize(
    ("harm", "io"),
    in_ci(
        *product(HARMS, ["direct"]), ("truncated", "mmap"), ("written into", "mmap"),
        of=product(HARMS, ["direct", "mmap"]),
    ),
)  # fmt: skip
def test_a_shard_that_changes_between_tokens_never_gives_a_wrong_token(
    harm: str, io: str, checkpoint: Path, outputs: Path
) -> None:
    model = streamed(checkpoint, outputs, io)
    expected = logits(model)
    for shard in checkpoint.glob("*.safetensors"):
        HARMS[harm](shard)
    if harm in ("deleted", "replaced"):  # what was opened is still there
        assert torch.equal(logits(model), expected)
        return
    with pytest.raises(CheckpointError, match="changed while it was being served"):
        logits(model)


def throw_anywhere(model: Any, *, times: int) -> None:
    """Have random modules of ``model`` throw, so often; each time it lets go of all that it took, and then answers."""
    expected, idle = logits(model), weights_onloaded(model)
    modules, chance = [m for m in model.modules() if m is not model], random.Random(1)

    def fail(_module: Any, *_: Any) -> None:
        raise ArithmeticError("thrown")

    for _ in range(times):
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


def test_exceptions_thrown_anywhere_leave_the_model_callable(checkpoint: Path, outputs: Path) -> None:
    throw_anywhere(streamed(checkpoint, outputs, "direct"), times=200)


@pytest.mark.long_form
def test_hundreds_of_generations_leave_memory_and_files_as_they_were(checkpoint: Path, outputs: Path) -> None:
    model, process = streamed(checkpoint, outputs, "direct"), psutil.Process()

    def generate(times: int) -> tuple[int, int]:
        for _ in range(times):
            model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=2, do_sample=False)
        gc.collect()
        memory = process.memory_info()
        return memory.rss - memory.shared, process.num_fds()

    warm_memory, warm_files = generate(100)
    memory, files = generate(300)
    assert files == warm_files
    assert memory - warm_memory < 3 * 2**20, "10 KB a generation"


def test_letting_go_of_the_model_closes_its_files(checkpoint: Path, outputs: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    logits(plain)
    gc.collect()
    before = psutil.Process().num_fds()
    model = streamed(checkpoint, outputs, "direct")
    logits(model)
    assert psutil.Process().num_fds() > before
    del model
    gc.collect()
    assert psutil.Process().num_fds() == before


READS = "preadv,preadv2"
"""What the interpreter makes of ``os.preadv``, with which weights are read directly: the one or the other."""
PROMPT = "generate.prompts=[[5,6,7]]"
DISK = ("device_map=disk", "max_memory.cpu=1.2MB", "storage.io=direct", PROMPT)
LENGTH = ("generate.max_new_tokens=16", "generate.min_new_tokens=16")
FAILS_AT = 100
"""strace counts by thread. Eight make the 76 reads of each of the 16 tokens, 152 each if they share evenly: one surely
comes so far before the last token, whose read-ahead nobody waits for, and none in the first.
"""


def traced(folder: Path, *options: str) -> Finished:
    """Run the command in ``folder``, all weights on disk, under strace with ``options``; see ``READS``."""
    before = records_in(folder)
    command = [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-qq",
        "-o",
        "reads",
        "-e",
        f"trace={READS}",
        *options,
        *COMMAND,
        *DISK,
        *LENGTH,
    ]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)
    new = [record for path, record in records_in(folder).items() if path not in before]
    return Finished(done.returncode, done.stdout, done.stderr, new)


def may_trace() -> bool:
    """Return whether strace is there and may trace: containers often forbid it."""
    if shutil.which("strace") is None:
        return False
    inject = ["-e", f"inject={READS}:error=EIO:when=1"]
    tried = subprocess.run(
        ["strace", "-f", "--seccomp-bpf", "-o", os.devnull, *inject, "true"], capture_output=True, check=False
    )
    return tried.returncode == 0


@pytest.mark.skipif(not may_trace(), reason="strace isn't here, or may not trace")
def test_a_read_that_fails_while_decoding_ends_the_run_in_one_line(
    fresh_folder: Path, offstage: Callable[..., Finished]
) -> None:
    in_memory = offstage(PROMPT, *LENGTH)
    assert in_memory.code == 0, in_memory.err
    failed = traced(fresh_folder, "-e", f"inject={READS}:error=EIO:when={FAILS_AT}")
    assert "(INJECTED)" in fresh_folder.joinpath("reads").read_text()
    assert failed.code == 5, failed.err
    (line,) = (line for line in failed.err.splitlines() if "offstage: " in line)
    assert re.search(r"model-0000\d-of-00004\.safetensors: reading at byte \d+ failed: Input/output error", line)
    assert "Traceback" not in failed.out + failed.err
    assert (failed.record["status"], failed.record["error"]["stage"]) == ("failed", "generate")
    assert failed.record["outputs"] == []
    again = offstage(*DISK, *LENGTH)
    assert (again.code, again.tokens, again.cached["generate"]) == (0, in_memory.tokens, False), again.err
