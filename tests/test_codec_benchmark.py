"""The benchmark of packed weights: its checkpoints are what transformers reads, its table says what was measured."""

import importlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.packed_references import without_asking_for_accelerate

codec_table = importlib.import_module("tests.benchmarks.codec_table")


def _side(seconds: float, *, predicted: float, streamed: float, tokens: tuple[int, ...] = (1, 2)) -> dict[str, Any]:
    sizes = {"streamed": streamed, "predicted_streamed": streamed * 1.01, "peak": 1.5e9, "predicted_peak": 1.6e9}
    return {"seconds": seconds, "predicted": predicted, "tokens": list(tokens), "wall": 10 + seconds, **sizes}


def _kept() -> dict[str, Any]:
    """Return rounds at two rates: packed is faster on the slow storage, and slower on the fast one."""
    by_rate = {}
    for name, rate, raw, (base, packed) in (("200MB", 2e8, 2e8, (6.0, 4.0)), ("full", None, 8e8, (1.0, 1.5))):
        sides = {
            "unpacked": _side(base, predicted=base * 1.05, streamed=1.2e9),
            "packed": _side(packed, predicted=packed, streamed=0.8e9),
        }
        first = {**sides["packed"], "wall": 24.0, "rested": 2 * 10**9, "packed": 1.34 * 10**9}
        by_rate[name] = {"rate": rate, "rounds": [{"sides": sides, "raw": [raw, raw]}] * 3, "first": first}
    return by_rate


@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "gguf"])
def test_a_packed_checkpoint_is_unpacked_by_transformers_to_its_twin(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed_checkpoints = importlib.import_module("tests.benchmarks.packed_checkpoints")
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    monkeypatch.setitem(packed_checkpoints.SHAPES, "0.1b", shape)
    packed, twin = packed_checkpoints.make_pair(kind, "0.1b", tmp_path)
    assert packed_checkpoints.make_pair(kind, "0.1b", tmp_path) == (packed, twin)
    loaded = []
    for folder in (packed, twin):
        where = {"gguf_file": folder.name} if folder.is_file() else {}
        place = folder.parent if where else folder
        with without_asking_for_accelerate():
            model, report = AutoModelForCausalLM.from_pretrained(
                place, dtype=torch.bfloat16, output_loading_info=True, **where
            )
        assert not any(report.values())
        loaded.append(model.state_dict())
    assert all(torch.equal(tensor, loaded[1][name]) for name, tensor in loaded[0].items())
    files = [packed] if packed.is_file() else packed.glob("*.safetensors")
    assert sum(file.stat().st_size for file in files) < sum(file.stat().st_size for file in twin.glob("*.safetensors"))


def test_what_was_packed_is_counted_by_the_index_of_the_store(tmp_path: Path) -> None:
    plain = {"dtype": "float32", "shape": [9], "bytes": 36}
    packed = {"dtype": "bfloat16", "shape": [3, 4], "codec": "zstd"}
    incompressible = {"dtype": "bfloat16", "shape": [7], "codec": "none"}
    index = {"a": plain, "b.zstd": packed, "c.zstd": incompressible}
    tmp_path.joinpath("index.json").write_text(json.dumps(index))
    tmp_path.joinpath("a.dat").write_bytes(bytes(36))
    tmp_path.joinpath("b.zstd.dat").write_bytes(bytes(17))
    assert importlib.import_module("tests.benchmarks.codec").packed_sizes(tmp_path) == {"rested": 24, "packed": 17}


def test_where_packing_stops_to_pay_is_found_between_the_rates() -> None:
    assert codec_table.break_even({1e8: 2.0, 4e8: 0.5}) == pytest.approx(2e8)
    assert codec_table.break_even({1e8: 1.5, 4e8: 1.0, 8e8: 0.9}) == pytest.approx(4e8)
    assert codec_table.break_even({1e8: 2.0, 4e8: 1.1}) is None
    assert codec_table.break_even({}) is None


def test_what_packing_brings_is_told_beside_what_was_predicted() -> None:
    lines = list(codec_table.lines(_kept(), "lossless"))
    _, slow, packed, *_ = (line.split() for line in lines)
    assert slow[:5] == ["200MB", "unpacked", "6.000", "6.300", "+5.0%"]
    assert packed[1:5] == ["packed", "4.000", "4.000", "+0.0%"]
    assert packed[-1] == "1.50"
    assert "200MB: raw direct reads 200 MB/s; all gave the same tokens" in lines
    assert "200MB: packed 2,000 MB to 1,340 (0.670)" in lines
    assert (
        "200MB: the first run took 24.0 s, later ones 14.0 s: 10.0 s, 200 MB/s of weights; made good after 5 tokens"
        in lines
    )
    assert lines[-3] == "predictions are off by at most: seconds 5.0%, streamed 1.0%, peak 6.7%"
    assert lines[-1] == "packing pays up to 400 MB/s as measured"


def test_what_packing_costs_by_itself_is_told_with_what_plans_make_of_other_storage() -> None:
    speeds = importlib.import_module("tests.benchmarks.codec_speeds").speeds(2**20)
    assert speeds["share"] == pytest.approx(0.67, abs=0.01)
    kept = _kept()
    kept["full"] |= {"speeds": speeds | {"packing": 4e8, "unpacking": 5e9}}
    kept["full"] |= {"forecasts": {"1GB": [2.0, 1.0], "4GB": [0.5, 1.0]}}
    *_, by_itself, planned = codec_table.lines(kept, "lossless")
    assert by_itself == f"weights are packed at 0.40 GB/s, to {speeds['share']:.3f}, and unpacked at 5.00"
    assert planned.endswith("times as fast 2.00 at 1GB, 0.50 at 4GB; packing pays up to 2,000 MB/s")


def test_sides_that_die_or_say_other_tokens_are_told() -> None:
    kept = _kept()
    killed = {"seconds": None, "failed": "exit -9: nothing said"}
    other = _side(1.5, predicted=3.0, streamed=0.8e9, tokens=(1, 3))
    kept["full"]["rounds"] = [{"sides": {"unpacked": killed, "packed": other, "accelerate 1GB": killed}, "raw": [8e8]}]
    lines = list(codec_table.lines({"full": kept["full"] | {"first": killed}}, "fp8"))
    assert lines[1].split(maxsplit=2) == ["full", "unpacked", "no figure: exit -9: nothing said"]
    assert lines[3].split(maxsplit=3)[3] == "no figure: exit -9: nothing said"
    assert "full: the first run has no figure: exit -9: nothing said" in lines
    assert lines[-1].startswith("predictions are off by at most: seconds 100.0% (TOO MUCH)")


def test_what_was_kept_of_packing_is_told_and_drawn_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, picture = tmp_path / "kept.json", tmp_path / "lossless.png"
    kept.write_text(json.dumps({"rounds": _kept()}))
    monkeypatch.setattr("sys.argv", ["codec", "1.1b", "lossless", "--json", str(kept), "--plot", str(picture)])
    importlib.import_module("tests.benchmarks.codec").main()
    assert "as measured" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_command_that_is_throttled_is_in_a_group_that_limits_its_disk(tmp_path: Path) -> None:
    throttle = importlib.import_module("tests.benchmarks.throttle")
    with throttle.throttled(tmp_path, None) as enter:
        assert enter(["true"]) == ["true"]
    try:
        with throttle.throttled(tmp_path, 10**8) as enter:
            command = enter(["cat", "/proc/self/cgroup"])
            group = Path(command[3]).parent
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            limits = "".join(group.joinpath(name).read_text() for name in throttle.limit_files(group))
    except throttle.ThrottleError as error:
        pytest.skip(str(error))
    assert f"/{group.name}\n" in said
    assert f"{throttle.disk_of(tmp_path)} " in limits
    assert "100000000" in limits
    assert not group.exists()


def test_a_folder_on_no_disk_cannot_be_throttled() -> None:
    throttle = importlib.import_module("tests.benchmarks.throttle")
    with pytest.raises(throttle.ThrottleError, match="/proc lies on no disk"), throttle.throttled(Path("/proc"), 1):
        pass
