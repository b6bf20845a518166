"""The command with ``quantized.products=fused``: tokens, what is kept, and refusals in a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Finished

pytest.importorskip("gguf")

from tests.stages.checkpoints.test_gguf_entries import made

Run = Callable[..., Finished]
ASKED = ("model=pretrained", "generate.prompts=[[5, 66, 100, 33]]", "generate.max_new_tokens=8")
RATES = "hardware.rates={storage: 1GB, host: 10GB, dequantising: 1GB}"
FUSED = "quantized.products=fused"


@pytest.mark.long_form
def test_tokens_are_the_same_from_memory_and_from_disk_and_exact_ones_are_made_anew(
    offstage_here: Run, tmp_path: Path
) -> None:
    asked = (*ASKED, RATES, f"model.path={made(tmp_path, 'llama')}")
    memory = offstage_here(*asked, FUSED, "device_map=cpu")
    assert memory.code == 0, memory.err
    again = offstage_here(*asked, FUSED, "device_map=cpu")
    disk = offstage_here(*asked, FUSED, "device_map=disk")
    exact = offstage_here(*asked, "device_map=cpu")
    assert memory.tokens == again.tokens == disk.tokens
    assert again.cached["generate"]
    assert len(exact.tokens[0]) == len(memory.tokens[0])
    assert not exact.cached["empty_init"]
    assert not exact.cached["generate"]
    predicted = [run.record["memory"]["predicted"]["cpu"] for run in (memory, exact)]
    assert predicted[0] < predicted[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("model=tiny", FUSED),
            "quantized.products: 'fused' is for quantised checkpoints and model.quantize, and the model is none",
        ),
        (
            ("model=tiny", "quantized.compute_dtype=bfloat16"),
            "quantized.compute_dtype: 'bfloat16' is for quantized.products=fused; take null",
        ),
        (("model=tiny", "quantized.tiles=true"), "quantized.tiles: true is for quantized.products=fused; take false"),
        (("model=tiny", "quantized.products=some"), "quantized.products: 'some' is none of exact, fused"),
    ],
)
def test_what_can_not_be_is_refused_in_a_line(offstage_here: Run, arguments: tuple[str, ...], words: str) -> None:
    done = offstage_here(*arguments)
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert words in done.err


def test_a_training_is_refused(offstage_here: Run, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("On the stern a sail is set.\n" * 40)
    done = offstage_here(
        "model=pretrained", f"model.path={made(tmp_path, 'llama')}", "stages=finetune", FUSED,
        f"finetune.text_file={tmp_path / 'text.txt'}",
    )  # fmt: skip
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert "quantized.products: 'fused' has no gradients, and the run trains; take 'exact'" in done.err
