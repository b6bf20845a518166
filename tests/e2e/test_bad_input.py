"""Bad input: one clear line, the exit code of its kind, no traceback, no run left running, nothing half-written."""

import json
import shutil
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest

import tests.e2e.conftest as harness
from tests.e2e.conftest import Finished, environment
from tests.long_form import in_part

Run = Callable[..., Finished]
TINY = resources.files("offstage.conf") / "checkpoints" / "tiny"
CONFIG, CHECKPOINT, BUDGET = 2, 3, 4


def refused(done: Finished, code: int, *words: str) -> None:
    """Check that a command was refused as the design says."""
    assert done.code == code, (done.code, done.err)
    lines = [line for line in done.err.splitlines() if line.startswith("offstage: ")]
    assert len(lines) == 1, done.err
    assert all(word in lines[0] for word in words), lines[0]
    assert "Traceback" not in done.err
    for record in done.records:
        assert record["status"] == "failed"
        assert record["error"]["message"] in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    in_part([
        (["max_memry=3"], ["max_memry: unknown key", "did you mean 'max_memory'"]),
        (["generate.max_new_token=3"], ["generate.max_new_token: no such option", "did you mean 'max_new_tokens'"]),
        (["stages=[empty_init,pln]"], ["stages: 'pln' is no stage", "did you mean 'plan'"]),
        (["model.pth=x"], ["model.pth: unknown key", "did you mean 'path'"]),
        (["storage.o=direct"], ["storage.o: unknown key", "did you mean 'io'"]),
        (["seed=-1"], ["seed: -1 is no seed", "whole number"]),
        (["device_map=balanced_low"], ["device_map", "'balanced_low'", "did you mean 'balanced_low_0'"]),
        (["max_memory.cpu=-1GB"], ["max_memory.cpu", "'-1GB' is not a size", "accepted"]),
        (["max_memory.cpu=1.5"], ["max_memory.cpu", "'1.5' is not a size"]),
        (["max_memory.cpu=12Gb"], ["max_memory.cpu", "'12Gb' is not a size"]),
        (["max_memory.cpu=nan"], ["max_memory.cpu", "nan"]),
        (["max_memory.gpu=1GB"], ["gpu"]),
        (["dtype=float8"], ["dtype: 'float8' is none of auto, float32, float16, bfloat16"]),
        (["device_map={model.embed_tokens: cpu, model.layer: cpu}"], ["model.layer", "did you mean 'model.layers'"]),
        (["device_map={model.layers: cpu}"], ["device_map", "model.embed_tokens"]),
        (["device_map={model: cpu, lm_head: gpu}"], ["device_map", "'gpu' is not a device"]),
        (["device_map=gone.json"], ["device_map", "gone.json"]),
        (["device_map={'bad"], ["device_map"]),
        (["model.tokenizer={a: 1}"], ["model.tokenizer: {'a': 1} is no text; give a folder that has one, or null"]),
        (["model=pretraind"], ["pretraind"]),
        (["model=module"], ["model._target_: no value"]),
        (["model=module", "model._target_=no.such.Class", f"model.path={TINY}"], ["model._target_", "no.such.Class"]),
        (["generate.prompts=[[99999]]"], ["token id 99999", "3072 words"]),
        (["stop_after=nothing"], ["stop_after: 'nothing'"]),
        (["seed=-3"], ["seed: -3"]),
    ]),
    ids=lambda value: " ".join(value)[:40],
)  # fmt: skip
def test_a_bad_config_is_one_line_and_exit_2(arguments: list[str], words: list[str], offstage_here: Run) -> None:
    if arguments == ["model=module"]:
        arguments = ["model=module", "model.path=."]
    refused(offstage_here(*arguments), CONFIG, *words)


@pytest.mark.parametrize("override", ["max_memory.cpu=2MB", "max_memory={cpu: 2MB}"])
def test_a_budget_added_to_a_files_null_says_what_to_write(override: str, offstage_here: Run, tmp_path: Path) -> None:
    tmp_path.joinpath("mine.yaml").write_text("defaults: [config, _self_]\nmax_memory: null\n")
    done = offstage_here("--config-dir", str(tmp_path), "--config-name", "mine", override)
    refused(done, CONFIG, "max_memory", "null", "write {} in the file")


@pytest.mark.from_nothing
def test_several_faults_are_all_reported_and_nothing_has_run(offstage_here: Run, tmp_path: Path) -> None:
    done = offstage_here("dtype=float8", "max_memory.cpu=-1", "device_map=best", "generate.beams=2", "seed=x")
    lines = [line for line in done.err.splitlines() if line.startswith("offstage: ")]
    assert done.code == CONFIG
    assert len(lines) == 5, done.err
    assert not list(tmp_path.glob("outputs/cache/*/*/manifest.json"))
    assert done.record["status"] == "failed"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a copy of the embedded checkpoint, to be harmed."""
    return Path(shutil.copytree(str(resources.files("offstage.conf") / "checkpoints" / "tiny"), tmp_path / "ckpt"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def cut(folder: Path) -> None:
    data = shards(folder)[1].read_bytes()
    shards(folder)[1].write_bytes(data[:-10])


def rename_tensor(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {k.replace("model.norm", "model.nrm"): v for k, v in index["weight_map"].items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


HARMS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a missing folder": (shutil.rmtree, ["model.path", "ckpt"]),
    "no config.json": (lambda f: (f / "config.json").unlink(), ["config.json"]),
    "a config that isn't JSON": (lambda f: (f / "config.json").write_text("{"), ["config.json", "JSON"]),
    "a config of an unknown model": (
        lambda f: (f / "config.json").write_text('{"model_type": "nonesuch"}'), ["config.json", "nonesuch"]
    ),
    "an unknown architecture": (
        lambda f: (f / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalML"]}'),
        ["LlamaForCausalML", "did you mean 'LlamaForCausalLM'"],
    ),
    "a missing shard": (lambda f: shards(f)[1].unlink(), ["model-00002-of-"]),
    "a truncated shard": (cut, ["model-00002-of-"]),
    "no weights at all": (
        lambda f: [p.unlink() for p in [*shards(f), f / "model.safetensors.index.json"]], ["ckpt"]
    ),
    "an index that names no such tensor": (rename_tensor, ["model.nrm"]),
    "an index with a path": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}'),
        ["../x.safetensors"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("harm", in_part(HARMS))
def test_a_bad_checkpoint_is_one_line_and_exit_3(harm: str, checkpoint: Path, offstage_here: Run) -> None:
    do, words = HARMS[harm]
    do(checkpoint)
    refused(offstage_here(f"model.path={checkpoint}", "max_memory.cpu=2MB"), CHECKPOINT, *words)


def test_a_config_of_other_sizes_than_the_weights_is_refused(checkpoint: Path, offstage_here: Run) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "hidden_size": 96}))
    done = offstage_here(f"model.path={checkpoint}", "max_memory.cpu=2MB")
    assert done.code == CHECKPOINT
    assert "k_proj.weight' is [64, 192] instead of [64, 96]" in done.err
    assert "Traceback" not in done.err


@pytest.mark.long_form
def test_a_budget_that_cannot_hold_its_reserve_is_refused_before_a_weight_is_read(offstage_here: Run) -> None:
    done = offstage_here("max_memory.cpu=100KB")
    refused(done, BUDGET, "100")
    assert "shard_load" not in done.cached


@pytest.mark.long_form
def test_hydra_full_error_shows_it_all(offstage: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "environment", lambda: environment({"HYDRA_FULL_ERROR": "1"}))
    done = offstage("dtype=float8")
    assert "Traceback" in done.err
    assert done.code not in (0, None)
