"""The benchmarks are no part of the tests, since they measure; but they must start."""

import argparse
import importlib
import json
import math
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.pages import all_commands
from tests.pipeline.report.sample_runs import repeat, write_run

BENCHMARKS = sorted(file.stem for file in Path(__file__).with_name("benchmarks").glob("[!_]*.py"))

COMMANDS = [one for one in all_commands() if re.match(r"python -m tests\.benchmarks\.(?!checkpoints)\w+ ", one)]
"""Those with arguments. What makes checkpoints has no ``main``."""
STANDS_FOR = {"SIZE": "1.1b", "NAME": "1.1b"}
"""What is put in place of a word that a reader is to replace."""


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_can_be_imported(name: str) -> None:
    assert importlib.import_module(f"tests.benchmarks.{name}").__doc__


class _TakenError(Exception):
    """What a benchmark is given are arguments that it takes."""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_a_page_is_one_that_its_benchmark_takes(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(parser: argparse.ArgumentParser, given: Sequence[str] | None = None, _: object = None) -> None:
        _, unknown = parser.parse_known_args(given)
        assert unknown == []
        raise _TakenError

    module, *words = shlex.split(command)[2:]
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", take)
    monkeypatch.setattr(sys, "argv", [module, *(STANDS_FOR.get(word, word) for word in words if word != "…")])
    with pytest.raises(_TakenError):
        importlib.import_module(module).main()


def test_the_rules_of_eviction_can_be_set_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("tests.benchmarks.eviction").main(["--short"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert [row[0] for row in rows] == ["uniform"] * 12 + ["skewed"] * 12 + ["recorded"] * 12
    for row in rows:
        *rates, optimum = (float(cell.rstrip("%")) for cell in row[3:])
        assert max(rates) <= optimum


def test_the_mixture_that_is_measured_is_stored_as_published_ones_are(tmp_path: Path) -> None:
    from safetensors import safe_open
    from transformers import Qwen3MoeForCausalLM

    mixture = importlib.import_module("tests.benchmarks.mixture")
    config = mixture.mixture_config(8e9)
    config.update({"vocab_size": 8, "hidden_size": 16, "moe_intermediate_size": 8, "num_experts": 3, "head_dim": 4})
    config.update({"num_experts_per_tok": 2, "num_attention_heads": 4, "num_hidden_layers": 2})
    made = mixture.make_mixture(config, tmp_path / "made")
    model, report = Qwen3MoeForCausalLM.from_pretrained(made, output_loading_info=True)
    assert not any(report.values())
    model.save_pretrained(tmp_path / "saved")
    with safe_open(tmp_path / "saved/model.safetensors", "pt") as saved:
        assert set(json.loads((made / "model.safetensors.index.json").read_bytes())["weight_map"]) == set(saved.keys())


def test_the_mixture_has_about_the_bytes_that_were_asked_for() -> None:
    mixture = importlib.import_module("tests.benchmarks.mixture")
    for gigabytes in (1, 4, 8, 30):
        tensors = mixture.published_tensors(mixture.mixture_config(gigabytes * 1e9))
        assert 0.85 < sum(2 * math.prod(shape) for _, shape, _ in tensors) / (gigabytes * 1e9) <= 1


def test_what_a_mixture_costs_under_caps_is_told_and_drawn(tmp_path: Path) -> None:
    mixture = importlib.import_module("tests.benchmarks.mixture")
    ours = {"seconds": 0.5, "streamed": 4e8, "hit_rate": 0.25, "tokens": [1, 2, 2]}
    theirs = {name: {"seconds": seconds, "tokens": [1, 2, 2]} for name, seconds in (("1 GB", 4.0), ("2 GB", 3.0))}
    killed = {"seconds": None, "failed": "exit -9: nothing said"}
    sides = {"offstage": ours, **{f"accelerate {name}": side for name, side in theirs.items()}, "AirLLM": killed}
    by_cap = {"2GiB": [{"sides": sides}], "1GiB": [{"sides": dict.fromkeys(sides, killed)}]}
    said, routed, _, two, one = mixture.table(by_cap, mixture.mixture_config(8e9))
    assert said.startswith("2 of the 3 tokens")
    assert "452.98 MB" in routed
    assert two.split() == ["2GiB", "0.500", "400.00", "MB", "25.0%", "1.18", "6.0x", "-"]
    assert one.split() == ["1GiB", "no", "figure"]
    plot = importlib.import_module("tests.benchmarks.mixture_plot")
    plot.draw([mixture.result_under(cap, rounds) for cap, rounds in by_cap.items()], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_what_offloading_activations_costs_is_told_and_drawn(tmp_path: Path) -> None:
    activations = importlib.import_module("tests.benchmarks.activations")
    sides = importlib.import_module("tests.benchmarks.activation_sides")
    plain = sides.SideRun("none", 2.0, 8 * 10**8, 0, 0, "a")
    runs = [sides.SideRun("0.5", seconds, 4 * 10**8, 3 * 10**8, 3 * 10**8, "b") for seconds in (3.0, 9.0, 2.5)]
    result = activations.PlaceResult("disk", activations.Rates(2e9, 1e9), (plain, activations.median_of(runs)))
    limit, _, first, second, verdict = activations.table(result)
    assert limit == "disk: raw 2.00 GB/s away, 1.00 GB/s back"
    assert first.split() == ["none", "2.000", "1.00", "800.00", "MB", "100.0%", "0", "B", "0", "B", "0.000", "s"]
    assert second.split()[1:6] == ["3.000", "1.50", "400.00", "MB", "50.0%"]
    assert second.split()[6:] == ["300.00", "MB", "300.00", "MB", "0.450", "s"]
    assert verdict == "other gradients than none: 0.5"
    plot = importlib.import_module("tests.benchmarks.activations_plot")
    plot.draw([result], tmp_path / "peak.png")
    assert (tmp_path / "peak.png").stat().st_size > 1000


def test_every_side_of_the_activations_has_the_gradients_of_the_plain_step(tmp_path: Path) -> None:
    sides = importlib.import_module("tests.benchmarks.activation_sides")
    scene = importlib.import_module("tests.benchmarks.activation_scenes").SCENES["short-resnet"](2)
    done = {name: sides.run(scene, sides.SimulatedPlace(name, scene.model, tmp_path), 1) for name in sides.SIDES}
    assert len({side.gradients for side in done.values()}) == 1
    assert done["none"].out == done["0"].out == 0
    assert 0 < done["0.1"].out < done["0.5"].out < done["1"].out < done["save_on_cpu"].out
    assert all(side.out == side.back for side in done.values())
    assert done["1"].peak < done["0.5"].peak < done["0.1"].peak < done["0"].peak
    assert done["0"].peak == pytest.approx(done["none"].peak, rel=0.02)


def test_what_lockstep_costs_is_told_beside_batches(tmp_path: Path) -> None:
    lockstep = importlib.import_module("tests.benchmarks.lockstep")
    prompts = lockstep.make_prompts(3)
    assert lockstep.make_prompts(2) == prompts[:2]
    ours = {"predicted": 0.1, "streamed": 1e9, "peak": 1.5e9, "predicted_peak": 1.6e9}
    sides = {
        "offstage 1": {**ours, "seconds": 0.4, "answers": [[1, 2]]},
        "offstage 2": {**ours, "seconds": 0.2, "answers": [[1, 2], [3, 4]]},
        "accelerate 2": {"seconds": 4.0, "answers": [[1, 2], [3, 5]]},
        "accelerate 4": {"seconds": None, "failed": "exit -9: nothing said"},
    }
    _, one, two, batch, killed = lockstep.table([{"sides": sides}])
    assert one.split() == [
        "offstage",
        "1",
        "0.400",
        "2.50",
        "0.100",
        "1.00",
        "GB",
        "1.50",
        "GB",
        "1.60",
        "GB",
        "1",
        "of",
        "1",
    ]
    assert two.split()[2:4] == ["0.200", "5.00"]
    assert batch.split() == ["accelerate", "2", "2.000", "0.50", "-", "-", "-", "-", "1", "of", "2"]
    assert killed.split()[2:] == ["no", "figure:", "exit", "-9:", "nothing", "said"]


def test_what_was_kept_of_lockstep_is_told_and_drawn_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lockstep = importlib.import_module("tests.benchmarks.lockstep")
    sides = {}
    for size in (1, 2, 4, 8, 16):
        answers = [[7, place] for place in range(size)]
        ours = {"seconds": max(0.4 / size, 0.1), "predicted": max(0.44 / size, 0.1), "answers": answers}
        sides[f"offstage {size}"] = ours | {"streamed": 1e9 / size, "peak": 1e9, "predicted_peak": 1e9}
        sides[f"accelerate {size}"] = {"seconds": 1.2, "answers": [*answers[:-1], [0]]}
    sides["accelerate 16"] = {"seconds": None, "failed": "exit -9: nothing said"}
    kept, picture = tmp_path / "kept.json", tmp_path / "lockstep.png"
    kept.write_text(json.dumps({"rounds": [{"sides": sides}, {"sides": sides}]}))
    monkeypatch.setattr("sys.argv", ["lockstep", "1.1b", "--json", str(kept), "--plot", str(picture)])
    lockstep.main()
    text = capsys.readouterr().out
    assert "from 4.4 together on as predicted, from 4.0 as measured" in text
    assert "accelerate 8" in text
    assert "predicted peaks: +0.0% with 1 together, +0.0% with 2" in text
    assert "offstage is fastest with 4 together, 4.00 times as fast as one by one" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_repeated_sweep_that_has_been_run_is_told_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    repeated = importlib.import_module("tests.benchmarks.repeated")
    for number, (seconds, contended) in enumerate(((0.5, False), (0.501, True), (0.8, False))):
        taken = [repeat(seconds + place / 100, contended=contended and place > 2) for place in range(5)]
        write_run(tmp_path / "sweep" / str(number), budget=(number + 1) * 10**9, seconds=seconds + 0.02, repeats=taken)
    picture = tmp_path / "repeated.png"
    asked = ["repeated", "tiny", "--sweep", str(tmp_path / "sweep"), "--plot", str(picture)]
    monkeypatch.setattr("sys.argv", asked)
    repeated.main()
    assert capsys.readouterr().out.splitlines() == [
        "3 jobs, 15 repeats, others used the processor in 2 of them.",
        "Of 3 pairs of jobs 2 differ in the time of a token by a rank test (p < 0.05 for each pair); 1 are within the "
        "noise.",
        "Within the noise of #0: #1.",
        "Within the noise of #1: #0.",
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_where_more_bring_nothing_is_found_where_there_is_such_a_place() -> None:
    bend = importlib.import_module("tests.benchmarks.lockstep").bend
    assert bend({size: max(0.9 / size, 0.15) for size in (1, 2, 4, 8, 16, 32)}) == pytest.approx(6)
    assert bend({size: 0.9 / size for size in (1, 2, 4)}) is None
    assert bend(dict.fromkeys((1, 2, 4), 0.5)) is None
    assert bend({1: 0.5}) is None
    assert bend({}) is None


def test_what_guesses_bring_is_told_beside_plain_decoding() -> None:
    speculation = importlib.import_module("tests.benchmarks.speculation")
    first, second = speculation.make_prompts(2, every=10)
    assert len(first) == len(second) == len(speculation.TEXT) + 4
    assert [sum(token not in speculation.TEXT for token in prompt) for prompt in (first, second)] == [10, 9]
    ours = {"peak": 1.5e9, "predicted_peak": 1.6e9, "answers": [[1, 2]]}
    exact = {**ours, "seconds": 0.2, "tokens_per_pass": 2.5, "draft_acceptance": 0.81}
    sides = {"plain": {**ours, "seconds": 0.4}, "exact": exact, "batched": {**exact, "answers": [[1, 3]]}}
    _, *lines = (line.split() for line in speculation.table([{"sides": sides}]))
    peaks = ["1.50", "GB", "1.60", "GB"]
    assert lines == [
        ["plain", "0.400", "1.00", "-", "-", *peaks, "the", "same"],
        ["exact", "0.200", "2.00", "2.50", "81%", *peaks, "the", "same"],
        ["batched", "0.200", "2.00", "2.50", "81%", *peaks, "OTHERS"],
    ]


def test_what_a_checkpoints_identity_sees_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    identity = importlib.import_module("tests.benchmarks.identity")
    folder = identity.make_small(tmp_path / "checkpoint", layers=0)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    default, full = identity.count_seen(folder, count=60, whole=2)
    assert default.count == 60
    assert default.seen < 30, "two tensors of 12 MB, of each of which 64 kB are looked at"
    assert (full.seen, full.count) == (2, 2)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before, "each change is undone"
    identity.main(["--folder", str(tmp_path), "seconds", str(folder), "--looks-alone"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["0.02", "first", "first", "look"]


def test_what_products_cost_is_told_beside_the_limit() -> None:
    products = importlib.import_module("tests.benchmarks.products")
    side = {"expected": 0.4, "streamed": 0, "hits": 0.5, "load": 2.0, "peak": 2e9, "predicted_peak": 1e9}
    exact, fused = {**side, "seconds": 0.5, "tokens": [1, 2]}, {**side, "seconds": 0.25, "tokens": [1, 3]}
    other = {**fused, "seconds": 0.75, "streamed": 3e8, "tokens": [1, 2]}
    rounds = [{"exact all": exact, "fused all": fused, "fused 1GB": other}] * 2
    _, first, second, third = products.lines(rounds)
    assert first.split()[:3] == ["exact", "all", "0.500"]
    assert first.endswith("the same")
    assert second.endswith("the same")
    assert third.split()[:3] == ["fused", "1GB", "0.750"]
    assert third.endswith("others")
    assert products.limit(10**9, 4e9) == "1.00 GB at 4.0 GB/s from memory: 0.250 s a token at the least"
    assert products.memory_rate() > 1e8


@pytest.mark.parametrize("name", ["q8_0", "int4", "nf4", "mxfp4", "gptq3", "awq4", "float32"])
def test_products_are_timed_in_each_kind_of_format(name: str) -> None:
    speeds = importlib.import_module("tests.benchmarks.product_speeds").speeds(name, 1)
    assert len(speeds) == 3
    assert all(0 < seconds < 1e6 for pair in speeds for seconds in pair)


def test_two_engines_are_told_side_by_side() -> None:
    llama_cpp = importlib.import_module("tests.benchmarks.llama_cpp")
    ours = {"seconds": 0.06, "first": 9.0, "peak": 2e9, "tokens": [1, 2]}
    theirs = {"seconds": 0.05, "first": 3.0, "peak": 1e9, "tokens": [1, 2]}
    table = llama_cpp.lines("q8_0", [{"offstage": ours, "llama.cpp": theirs}] * 3)
    assert table[1].split()[:3] == ["offstage", "0.060", "9.00"]
    assert table[3].split() == ["ratio", "1.20", "3.00", "2.00"]
    assert table[4] == "the tokens are the same"
    other = [{"offstage": ours, "llama.cpp": {**theirs, "tokens": [1, 3]}}]
    assert llama_cpp.lines("q8_0", other)[4] == "the tokens are others"
    capped = [{"offstage": {"seconds": 0.2}, "llama.cpp": {"seconds": 0.6}}]
    assert llama_cpp.capped_lines("q8_0", 0.4, capped)[3] == "ratio      3.00 times as fast"
    capped.append({"offstage": {"seconds": 0.2}, "llama.cpp": {"seconds": None}})
    assert llama_cpp.capped_lines("q8_0", 0.4, capped)[1:] == ["offstage   0.200", "llama.cpp  died"]


def test_each_section_that_needs_a_gpu_is_tried_without_one_by_the_same_command() -> None:
    gpu = importlib.import_module("tests.benchmarks.gpu")
    modules = [{name: one.command.split()[1] for name, one in table.items()} for table in (gpu.SECTIONS, gpu.TRIALS)]
    assert modules[0] == modules[1]


def test_sections_for_a_gpu_go_on_after_one_that_fails_or_takes_too_long_and_are_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = importlib.import_module("tests.benchmarks.gpu")
    commands = {"fails": "-c exit(3)", "takes long": "-c while(1):pass", "ends": "-c print('done')"}
    sections = {name: gpu.Section(command, 10 if name != "takes long" else 1) for name, command in commands.items()}
    monkeypatch.setattr(gpu, "SECTIONS", sections)
    monkeypatch.setattr(gpu, "TRIALS", sections)
    monkeypatch.setattr(sys, "argv", ["gpu", "--simulated", "--folder", str(tmp_path)])
    kept = []
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            gpu.main()
        assert ended.value.code == 1
        kept.append(json.loads((tmp_path / "gpu.json").read_text()))
    assert [(name, section["code"]) for name, section in kept[0].items()] == [
        ("fails", 3),
        ("takes long", None),
        ("ends", 0),
    ]
    assert kept[1] == kept[0], "nothing was done again"
    assert "| takes long | took too long |" in (tmp_path / "gpu.md").read_text()
