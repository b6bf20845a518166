"""Whole commands on checkpoints that rest packed, each changed in one place, as ``tests/fuzz/commands.py`` has them."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path

from transformers import LlamaConfig

from tests.benchmarks.packed_checkpoints import make_fp8
from tests.fuzz.commands import (
    CHECKPOINT,
    RefusedError,
    attempt_checkpoint,
    judge,
    measure_once,
    run_command,
    tokens_in,
)
from tests.fuzz.formats import RIGHT, Format, require
from tests.fuzz.mutations import JSON, SAFETENSORS
from tests.fuzz.packed_mutations import FRAMES, GGUF
from tests.fuzz.texts import TINY
from tests.stages.checkpoints.ggufs import make_gguf

FILE = "model.gguf"
KINDS = ("q4_k", "q6_k", "q8_0")
PACKED_RUN = (*CHECKPOINT, "device_map=disk", "storage.codec=zstd")
GGUF_RUN = (f"model.path=ckpt/{FILE}", *CHECKPOINT[1:])


BAD_CHECKPOINT = (3,)
"""What a command exits with that was given one."""


def _make_fp8(folder: Path) -> None:
    make_fp8(TINY, folder / "ckpt", block=(64, 64))
    measure_once(folder, CHECKPOINT)


def _make_gguf(folder: Path) -> None:
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, vocab_size=320, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    folder.joinpath("ckpt").mkdir()
    make_gguf(folder / "ckpt" / FILE, "llama", config, kinds=KINDS, tokens=320)
    _own_cache(folder)
    measure_once(folder, GGUF_RUN)


def _attempt_gguf(folder: Path, pristine: Path) -> str:
    _own_cache(folder)
    return attempt_checkpoint(folder, pristine, arguments=GGUF_RUN, codes=BAD_CHECKPOINT, gguf_file=FILE)


def _make_copies(folder: Path) -> None:
    """Have a run that packs all that it streams."""
    shutil.copytree(TINY, folder / "ckpt")
    measure_once(folder, PACKED_RUN)
    code, said = run_command(PACKED_RUN, folder)
    require(code == 0, said)
    shutil.rmtree(folder / "outputs" / "runs")
    shutil.rmtree(folder / "outputs" / "cache" / "generate")


def _attempt_copies(folder: Path, _pristine: Path) -> str:
    """A run that meets a damaged copy ends before it is computed with, and the next one makes it anew."""
    wanted = json.loads((folder / "tokens.json").read_text())
    refused: RefusedError | None = None
    try:
        judge(*run_command(PACKED_RUN, folder), folder, codes=BAD_CHECKPOINT)
    except RefusedError as error:
        refused = error
        code, said = run_command(PACKED_RUN, folder)
        require(code == 0, f"refused again: {said[-2000:]}")
    require(tokens_in(folder) == wanted, f"tokens {tokens_in(folder)} instead of {wanted}")
    if refused is not None:
        raise refused
    return RIGHT


def _own_cache(folder: Path) -> None:
    """Have what is made of a GGUF file's head lie in ``folder``: the process is the case's own."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "home")


_attempt_fp8 = partial(attempt_checkpoint, codes=BAD_CHECKPOINT)
_command = partial(Format, apart=True)
FORMATS = (
    _command("run: fp8", _make_fp8, ("ckpt/*.safetensors",), SAFETENSORS, _attempt_fp8),
    _command("run: fp8 config", _make_fp8, ("ckpt/config.json",), JSON, attempt_checkpoint),
    _command("run: packed copies", _make_copies, ("outputs/cache/*.zstd.dat",), FRAMES, _attempt_copies),
    _command("run: gguf", _make_gguf, (f"ckpt/{FILE}",), GGUF, _attempt_gguf),
)
