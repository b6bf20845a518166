"""Layers on two simulated accelerators in turn, by the command: tokens, and what each link has to say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.e2e.conftest import Finished

Run = Callable[..., Finished]
WORDS = ["Once upon a time", "A", "It was 1, 2, 1, 2, 1, 2,", "The"]
LAYERS = json.loads(Path("conf/checkpoints/tiny/config.json").read_text())["num_hidden_layers"]
IN_TURN = {
    "": "cpu",
    **{f"model.layers.{layer}.input_layernorm": layer % 2 for layer in range(LAYERS)},
}
ASKED = (
    f"generate.prompts={json.dumps(WORDS)}", "generate.max_new_tokens=6", "generate.output_logprobs=true",
    "hardware.rates={storage: 10MB, host: 10GB, host_to_device: 10GB, device: 10GB}",
)  # fmt: skip
MACHINE = (
    "hardware.devices=[{memory: 60MB}, {memory: 60MB}]", "max_memory={0: 2MB, 1: 2MB, cpu: 8MB}"
)  # fmt: skip


def answers(run: Finished) -> list[tuple[list[int], list[float]]]:
    assert run.code == 0, run.err
    return [(output["token_ids"], output["logprobs"]) for output in run.record["outputs"]]


def test_answers_are_those_of_the_host_alone_in_lockstep_and_with_guesses_and_each_link_has_its_figures(
    offstage_here: Run, fresh_folder: Path
) -> None:
    device_map = fresh_folder / "in_turn.json"
    device_map.write_text(json.dumps(IN_TURN))
    alone = answers(offstage_here(*ASKED, "device_map=cpu", "max_memory.cpu=8MB", "generate.exact=true"))
    for option in ("generate.lockstep=3", "generate.prompt_lookup_num_tokens=4"):
        done = offstage_here(*ASKED, *MACHINE, f"device_map={device_map}", option)
        assert answers(done) == alone, option
        metrics = done.record["metrics"]
        links = [metrics[f"transfer_bytes_per_token.{device}"] for device in range(2)]
        assert all(links), option
        assert abs(sum(links) - metrics["streamed_bytes_per_token"]) <= 1, "but for what is rounded"
        assert (
            sum(metrics[f"transfer_stall_seconds.{device}"] for device in range(2)) <= metrics["stall_seconds"] * 1.001
        )
        assert "streamed to" in done.out
