"""Replays: the same machine says the same; what changed is found, and named."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from offstage.pipeline.cache.sealed_files import read_sealed
from offstage.pipeline.trust import outputs_for
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.samples import BLOCK_BYTES
from offstage.stages.machine.rates import coarse_rate
from tests.e2e.conftest import Finished, Replay, enter, records_in
from tests.long_form import in_part

Run = Callable[..., Finished]
EMBEDDED = Path(__file__).parents[2] / "conf" / "checkpoints" / "tiny"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of these tests have their folder, one after another: a record says where its run was."""
    return tmp_path_factory.mktemp("replays") / "place"


@pytest.fixture
def tmp_path(place: Path) -> Path:
    """The folder of these tests, empty."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    return place


@pytest.fixture(scope="module")
def completed(place: Path, described: Path) -> Path:
    """A copy of that folder after one completed run of the checkpoint in it."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(described, place / "outputs/cache")
    shutil.copytree(EMBEDDED, place / "checkpoint")
    length = ("generate.max_new_tokens=6", "generate.min_new_tokens=6")
    assert enter(place, f"model.path={place / 'checkpoint'}", "max_memory.cpu=3MB", *length) == 0
    return place.rename(place.with_name("completed"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the embedded checkpoint that a test may spoil."""
    return Path(shutil.copytree(EMBEDDED, tmp_path / "checkpoint", dirs_exist_ok=True))


@pytest.fixture
def run_path(completed: Path, tmp_path: Path) -> Path:
    """The record of one completed run in this test's folder."""
    shutil.copytree(completed, tmp_path, dirs_exist_ok=True)
    (path,) = records_in(tmp_path)
    return path


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def test_on_the_same_machine_it_is_the_same_and_really_runs_again(
    run_path: Path, replay: Replay, tmp_path: Path
) -> None:
    code, out, err = replay(run_path.parent)
    assert code == 0, err
    assert "tokens    the same" in out
    assert "plan      the same" in out
    assert "then," in out
    again = next(record for path, record in records_in(tmp_path).items() if path != run_path)
    assert not any(stage["cached"] for stage in again["stages"])
    kept = tmp_path / "outputs" / "cache" / "hardware" / "decoding.json"
    planned = json.loads(run_path.read_text())["stages"][1]["inputs"]["rates"]
    (figures,) = read_sealed(kept).values()
    figures = figures.get("figure", figures)  # where others computed meanwhile, as another test may
    assert {name: planned[name] for name in figures} == {name: coarse_rate(speed) for name, speed in figures.items()}
    assert again["stages"][1]["inputs"]["rates"] == planned, "it is planned with the rates of then"
    assert not list(tmp_path.glob("outputs/runs/*/*/.cache"))


@pytest.mark.long_form
def test_outputs_that_were_moved_are_used_where_they_are_and_their_cache_is_not_needed(
    run_path: Path, replay: Replay, tmp_path: Path
) -> None:
    outputs, archive = tmp_path / "outputs", tmp_path / "archive"
    run_path.parent.rename(outputs / "runs" / "mine")
    outputs.rename(archive)
    moved = archive / "runs" / "mine"
    shutil.rmtree(archive / "cache")
    code, out, err = replay(moved)
    assert code == 0, err
    assert "replay    archive/runs/" in out
    assert not outputs.exists(), "nothing of the old place comes back"


@pytest.mark.parametrize("run", ["runs/DATE/TIME", "runs/mine", "multirun/DATE/TIME/3", "multirun/study/day/seed=1/0"])
def test_a_replay_writes_into_the_outputs_that_its_record_lies_in(run: str, tmp_path: Path) -> None:
    folder = tmp_path / "archive" / run
    folder.mkdir(parents=True)
    assert outputs_for(folder / "run.json") == tmp_path / "archive"
    assert outputs_for(tmp_path / "mine" / "run.json") == Path("outputs").absolute()


def test_an_option_changed_in_the_record_gives_other_tokens_and_is_named(run_path: Path, replay: Replay) -> None:
    edit(run_path, lambda record: record["config"]["generate"].update(max_new_tokens=4, min_new_tokens=4))
    code, out, _ = replay(run_path)
    assert code == 1
    assert "different; sequence 0, token 4: was " in out
    assert "is nothing" in out
    assert "generate.options.max_new_tokens: was 6, is 4" in out


def test_tokens_that_the_record_lost_are_a_difference(run_path: Path, replay: Replay) -> None:
    """A record of another stage may have outputs without any, so this one is no damage that can be told."""
    edit(run_path, lambda record: record["outputs"][0].pop("token_ids"))
    code, out, _ = replay(run_path)
    assert code == 1
    assert "token 0" in out


def test_a_budget_changed_in_the_record_moves_modules_and_keeps_the_tokens(run_path: Path, replay: Replay) -> None:
    edit(run_path, lambda record: record["config"]["max_memory"].update(cpu="6MB"))
    code, out, _ = replay(run_path)
    assert code == 0
    assert "modules moved" in out
    assert "was disk, is cpu" in out
    assert "plan.demands[0].allowance.budgets.cpu" in out


def test_a_shard_with_one_byte_changed_in_its_header_is_not_replayed(
    run_path: Path, replay: Replay, checkpoint: Path
) -> None:
    shard = checkpoint / "model-00002-of-00004.safetensors"
    data = bytearray(shard.read_bytes())
    place = data.index(b'" ') if b'" ' in data[:200] else data.index(b"{", 8) + 1
    data[place] ^= 1
    shard.write_bytes(data)
    code, _, err = replay(run_path)
    assert code == 2
    assert shard.name in err


def scale(shard: Path, name: str, factor: float) -> None:
    """Multiply one weight of ``shard``, in its place, and set the file's time back."""
    before, metadata = shard.stat(), {"format": "pt"}
    tensors = load_file(shard)
    tensors[name] *= factor
    save_file(tensors, shard.with_suffix(".new"), metadata)
    shard.write_bytes(shard.with_suffix(".new").read_bytes())
    shard.with_suffix(".new").unlink()
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))


def shard_anew(checkpoint: Path, count: int) -> None:
    """Write the tensors of ``checkpoint`` into ``count`` files instead of its own, and an index of these."""
    old = sorted(checkpoint.glob("*.safetensors"))
    tensors = {name: tensor for path in old for name, tensor in load_file(path).items()}
    for path in old:
        path.unlink()
    names, weight_map = sorted(tensors), {}
    for number in range(count):
        part = {name: tensors[name] for name in names[number::count]}
        weight_map |= dict.fromkeys(part, f"part-{number}.safetensors")
        save_file(part, checkpoint / f"part-{number}.safetensors")
    checkpoint.joinpath("model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


WEIGHT, LARGE = "model.layers.5.self_attn.v_proj.weight", "model.layers.4.mlp.up_proj.weight"
IN = "model-00003-of-00004.safetensors"


def test_a_weight_that_changed_is_named_with_its_file_though_the_time_was_set_back(
    run_path: Path, replay: Replay, checkpoint: Path
) -> None:
    scale(checkpoint / IN, WEIGHT, 1.5)
    code, _, err = replay(run_path)
    assert code == 2
    assert f"{checkpoint}: {IN}: {WEIGHT} has other bytes than in that run; restore the files" in err


@pytest.mark.long_form
def test_other_times_and_other_inodes_are_no_matter(
    run_path: Path, replay: Replay, checkpoint: Path, tmp_path: Path
) -> None:
    for path in checkpoint.iterdir():
        os.utime(path)
    code, out, err = replay(run_path)
    assert code == 0, err
    assert "changed" not in out
    shutil.copytree(checkpoint, checkpoint.with_name("other"))
    shutil.rmtree(checkpoint)
    checkpoint.with_name("other").rename(checkpoint)
    code, out, err = replay(run_path)
    assert code == 0, err
    assert not any("compared" in record for record in records_in(tmp_path).values()), "there is nothing to say of it"


@pytest.mark.long_form
def test_the_same_tensors_in_other_files_are_taken_and_said_to_be(
    run_path: Path, replay: Replay, checkpoint: Path
) -> None:
    shard_anew(checkpoint, 3)
    code, out, err = replay(run_path)
    assert code == 0, err
    assert "The weights lie in other files than in that run, and all tensors are the same" in " ".join(out.split())
    assert "tokens    the same" in out
    holder = open_checkpoint(checkpoint).entries[WEIGHT].file.path
    scale(holder, WEIGHT, 1.5)
    code, _, err = replay(run_path)
    assert code == 2
    assert f"{holder.name}: {WEIGHT} has other bytes than in that run" in err


@pytest.mark.long_form
def test_without_what_was_seen_of_each_tensor_files_are_named(run_path: Path, replay: Replay, checkpoint: Path) -> None:
    run_path.with_name("weights.json").write_text("{")
    assert replay(run_path)[0] == 0
    scale(checkpoint / IN, WEIGHT, 1.5)
    code, _, err = replay(run_path)
    assert code == 2
    assert f"{checkpoint}: {IN} has other bytes than in that run" in err


@pytest.mark.long_form
def test_verify_full_finds_what_no_sample_meets_and_takes_no_other_files(
    offstage_here: Run, replay: Replay, checkpoint: Path, tmp_path: Path
) -> None:
    given = (f"model.path={checkpoint}", "max_memory.cpu=3MB", "generate.max_new_tokens=3")
    assert offstage_here(*given, "verify=full").code == 0
    assert offstage_here(*given).code == 0
    full, sampled = sorted(records_in(tmp_path))
    weights = json.loads(full.read_text())["inputs"]["weights"]
    assert all(file["sha256_from"] == "bytes" for file in weights["files"])
    path = checkpoint / IN
    extent = open_checkpoint(checkpoint).entries[LARGE]
    data = bytearray(path.read_bytes())
    data[extent.begin + BLOCK_BYTES] ^= 1
    path.write_bytes(data)
    code, _, err = replay(full)
    assert code == 2
    assert f"{IN} has other bytes than in that run; all its samples are the same" in err
    code, _, err = replay(sampled)
    assert (code in (0, 1), err) == (True, ""), "the default doesn't see it, which is documented"
    data[extent.begin + BLOCK_BYTES] ^= 1
    path.write_bytes(data)
    code, _, err = replay(full)
    assert code == 0, err
    shard_anew(checkpoint, 2)
    code, _, err = replay(full)
    assert code == 2
    assert "part-0.safetensors is no file of that run; all its samples are the same" in err


@pytest.mark.long_form
def test_a_record_without_digests_of_its_weights_says_that_they_were_compared_with_nothing(
    run_path: Path, replay: Replay
) -> None:
    edit(run_path, lambda record: record.pop("inputs"))
    code, out, err = replay(run_path)
    assert code == 0, err
    assert "recorded no digests of its weights" in " ".join(out.split())


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "inputs: [] isn't RunInputs": lambda record: record.update(inputs=[]),
    "inputs.weights: [] isn't RecordedWeights": lambda record: record["inputs"].update(weights=[]),
    "inputs.weights.files: {} isn't a list": lambda record: record["inputs"]["weights"].update(files={}),
    "inputs.weights.files.0.name is missing": lambda record: record["inputs"]["weights"]["files"][0].pop("name"),
    "inputs.weights.files.0.sampled: 3 isn't str": lambda record: record["inputs"]["weights"]["files"][0].update(
        sampled=3
    ),
}


@pytest.mark.parametrize("words", in_part(DAMAGE))
def test_a_record_whose_inputs_are_damaged_is_refused(words: str, run_path: Path, replay: Replay) -> None:
    edit(run_path, DAMAGE[words])
    code, _, err = replay(run_path)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


def test_a_checkpoint_that_is_gone_is_not_replayed(run_path: Path, replay: Replay, checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    code, _, err = replay(run_path)
    assert code == 2
    assert str(checkpoint) in err
    assert "Traceback" not in err


FAILED = {
    **{section: [] for section in ("overrides", "stages", "outputs")},
    **{section: {} for section in ("config", "environment", "metrics")},
    "status": "failed",
}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no run.json there; give the folder of a run"),
        ("{", "no JSON that can be read"),
        ("[]", "no run record"),
        ('{"schema_version": 99}', "no run record"),
        ('{"schema_version": 2, "status": "completed"}', "damaged: config is missing"),
        (json.dumps(FAILED), "the run is failed"),
    ],
)
def test_what_is_no_completed_run_is_refused(content: str | None, words: str, replay: Replay, tmp_path: Path) -> None:
    if content is not None:
        tmp_path.joinpath("run.json").write_text(content)
    code, _, err = replay(tmp_path)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


def test_the_folder_of_a_sweep_is_told_from_a_disk_at_fault(run_path: Path, replay: Replay, tmp_path: Path) -> None:
    sweep = tmp_path / "outputs" / "multirun" / "day" / "study"
    for number in (0, 10, 2):
        shutil.copytree(run_path.parent, sweep / str(number))
    code, _, err = replay(sweep)
    assert code == 2
    assert err == f"offstage-replay: {sweep}: a sweep, with 3 jobs (0, 2, 10); give the folder of one: {sweep / '0'}\n"
    code, _, err = replay(tmp_path / "outputs")
    assert (code, err.count("disk")) == (2, 0)
    assert "there is nothing" in replay(tmp_path / "nowhere")[2]
