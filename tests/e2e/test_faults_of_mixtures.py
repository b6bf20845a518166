"""What goes wrong while experts are brought one by one: said in one line, or without matter, as for other models."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from offstage.pipeline.errors import CheckpointError
from tests.e2e.conftest import Finished, finish, records_in, start, wait_for
from tests.e2e.pipelines import dispatched_model
from tests.e2e.test_bad_input import CHECKPOINT, refused
from tests.e2e.test_faults import HARMS, logits, throw_anywhere
from tests.long_form import in_ci
from tests.stages.dispatch.experts.mixtures import mixture

STORED = {"Mixtral": "one by one", "gpt-oss": "stacked"}
PROMPTS, TOKENS = [[5, 6, 7 + number] for number in range(16)], 8
REQUEST = (
    "device_map=disk", "max_memory.cpu=150KB", "storage.io=direct", f"generate.prompts={PROMPTS}",
    f"generate.max_new_tokens={TOKENS}", f"generate.min_new_tokens={TOKENS}", "generate.batch_size=1",
)  # fmt: skip
"""Fifteen answers are still to come when the first is there."""


@pytest.fixture(params=STORED)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    mixture(request.param).save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def streamed(checkpoint: Path, tmp_path: Path) -> Any:
    """Return a model all of whose experts are brought one by one, with slots for few of them."""
    model = dispatched_model(
        checkpoint, tmp_path / "outputs", device_map="disk", max_memory={"cpu": "150KB"}, storage={"io": "direct"}
    )
    model.set_experts_implementation("grouped_mm")
    return model


def plain_tokens(checkpoint: Path) -> list[list[int]]:
    """Return what the plain model in memory answers to ``PROMPTS``."""
    plain, options = AutoModelForCausalLM.from_pretrained(checkpoint).eval(), {"do_sample": False}
    options |= {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
    return [plain.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in PROMPTS]


def start_answering(folder: Path, checkpoint: Path) -> Any:
    """Start a run over ``PROMPTS`` in ``folder``, and return its process when the first answer is on the disk."""
    process = start(folder, f"model.path={checkpoint}", *REQUEST)

    def answered() -> bool:
        return any(file.stat().st_size for file in folder.glob("outputs/cache/generate/.tmp-*/generations.jsonl"))

    wait_for(answered, process)
    return process


@pytest.mark.long_form
@pytest.mark.parametrize("checkpoint", ["Mixtral"], indirect=True)
def test_a_run_that_is_killed_while_experts_stream_gives_the_same_tokens_when_run_again(
    checkpoint: Path, fresh_folder: Path
) -> None:
    killed = start_answering(fresh_folder, checkpoint)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL
    before = records_in(fresh_folder)
    again = finish(start(fresh_folder, f"model.path={checkpoint}", *REQUEST), fresh_folder, before)
    assert again.code == 0, again.err
    assert not again.cached["generate"]
    assert again.tokens == plain_tokens(checkpoint)


@pytest.mark.long_form
@pytest.mark.parametrize("checkpoint", ["gpt-oss"], indirect=True)
def test_a_shard_that_is_cut_short_while_experts_stream_ends_the_run_in_one_line(
    checkpoint: Path, fresh_folder: Path
) -> None:
    running = start_answering(fresh_folder, checkpoint)
    os.truncate(checkpoint / "model.safetensors", 4096)
    done = finish(running, fresh_folder, {})
    refused(done, CHECKPOINT, "model.safetensors", "changed while it was being served")


@pytest.mark.parametrize("harm", ["truncated", "written into"])
@pytest.mark.parametrize("checkpoint", in_ci("gpt-oss", of=STORED), indirect=True)
def test_a_shard_that_changes_between_tokens_never_gives_a_wrong_token(
    harm: str, checkpoint: Path, tmp_path: Path
) -> None:
    model = streamed(checkpoint, tmp_path)
    logits(model)
    HARMS[harm](checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match="changed while it was being served"):
        logits(model)


@pytest.mark.parametrize("checkpoint", in_ci("Mixtral", of=STORED), indirect=True)
def test_exceptions_thrown_anywhere_in_a_mixture_leave_it_callable(checkpoint: Path, tmp_path: Path) -> None:
    throw_anywhere(streamed(checkpoint, tmp_path), times=60)


def harm_tensor(checkpoint: Path, end: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> str:
    """Have ``change`` make another of the one tensor whose name has this ``end``, or none; return that name."""
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    (name,) = (name for name in tensors if name.endswith(end))
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else {**tensors, name: changed}, file, metadata={"format": "pt"})
    return name


EXPERT = {"Mixtral": "layers.1.block_sparse_moe.experts.3.w2.weight", "gpt-oss": "layers.1.mlp.experts.down_proj"}


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "missing": lambda _: None,
    "of another shape": lambda tensor: tensor[:-1].clone(),
}


@pytest.mark.parametrize(
    ("change", "stored"),
    in_ci(("missing", "Mixtral"), ("of another shape", "gpt-oss"), of=product(CHANGES, STORED)),
)
def test_an_expert_that_is_not_as_the_model_has_it_is_one_line_and_exit_3(
    change: str, stored: str, tmp_path: Path, offstage_here: Callable[..., Finished]
) -> None:
    folder = tmp_path / "checkpoint"
    mixture(stored).save_pretrained(folder)
    name = harm_tensor(folder, EXPERT[stored], CHANGES[change])
    done = offstage_here(f"model.path={folder}", "max_memory.cpu=150KB", "generate.prompts=[[5,6,7]]")
    refused(done, CHECKPOINT, name)
    assert "generate" not in done.cached
