import hashlib
import multiprocessing
import os
import re
import resource
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offstage.pipeline.cache.fingerprint import fingerprint
from offstage.pipeline.errors import CheckpointError, ConfigError, StorageError
from offstage.pipeline.stage import Stage, keyed
from offstage.stages.shard_load.stage import ShardLoadStage
from tests.stages.shard_load.checkpoints import (
    FakeContext,
    artifact_of,
    assert_same,
    empty_model,
    load,
    make_context,
    make_model,
    revive,
    save_bin,
    save_safetensors,
    state_of,
)

BFLOAT16 = torch.bfloat16


def context_for(root: Path, folder: Path, **config: object) -> FakeContext:
    return make_context(root, folder, lambda: empty_model("llama", BFLOAT16), lambda name: "disk", **config)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A ``.bin`` checkpoint: all that lies on disk must go through the offload store."""
    return save_bin(make_model("llama", BFLOAT16), tmp_path / "checkpoint")


def test_it_is_a_stage() -> None:
    assert isinstance(ShardLoadStage(), Stage)


@pytest.mark.parametrize(("expands", "simulated"), [(True, False), (False, False), (True, True)])
def test_segments_expand_before_the_first_weight_lies_on_an_accelerator_that_is_there(
    expands: bool, simulated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_safetensors(make_model("llama", BFLOAT16), tmp_path / "plain")
    context = make_context(tmp_path, folder, lambda: empty_model("llama", BFLOAT16), lambda name: 0)
    inputs, done = ShardLoadStage().gather(context), list[str]()

    def place_first(*_: object, **__: object) -> None:
        done.append("a weight")
        raise InterruptedError

    monkeypatch.setattr("offstage.stages.machine.expandable_segments.turn_on", lambda: done.append("segments"))
    monkeypatch.setattr("offstage.stages.shard_load.place.place", place_first)
    devices = {**inputs.plan.devices, 0: inputs.plan.devices["cpu"]}
    planned = replace(inputs.plan, devices=devices, expandable=expands)
    with pytest.raises(InterruptedError):
        ShardLoadStage().revive(replace(inputs, plan=planned, ledgers={0: 10**9} if simulated else {}), context)
    assert done == [*["segments"] * (expands and not simulated), "a weight"]


def test_its_summary_says_what_was_read_where(tmp_path: Path, checkpoint: Path) -> None:
    load(context_for(tmp_path, checkpoint), tmp_path / "out")
    artifact = artifact_of("shard_load", tmp_path / "out")
    assert ShardLoadStage().report(artifact).summary == "1 file, 0 B stream from there, 43.33 kB copied"
    entry = artifact.json("offload_index.json")["lm_head.weight"]
    assert entry == {
        "source": "store", "file": "lm_head.weight.dat", "dtype": "bfloat16", "shape": [96, 32], "offsets": [0, 6144],
    }  # fmt: skip


def test_a_second_load_writes_nothing(tmp_path: Path, checkpoint: Path) -> None:
    load(context_for(tmp_path, checkpoint), tmp_path / "out")
    files = {file: file.stat().st_mtime_ns for file in tmp_path.glob("cache/offload/*/*.dat")}
    assert len(files) == 21
    load(context_for(tmp_path / "again", checkpoint), tmp_path / "out2")
    context = context_for(tmp_path, checkpoint)
    load(context, tmp_path / "out2")
    assert files == {file: file.stat().st_mtime_ns for file in files}


def test_what_the_store_lost_is_made_again(tmp_path: Path, checkpoint: Path) -> None:
    context = context_for(tmp_path, checkpoint)
    before = state_of(load(context, tmp_path / "out"))
    shutil.rmtree(tmp_path / "cache" / "offload")
    assert_same(state_of(revive(context)), before)


def test_a_given_folder_is_used_and_one_of_another_checkpoint_is_not_read(tmp_path: Path, checkpoint: Path) -> None:
    given = tmp_path / "offload"
    load(context_for(tmp_path, checkpoint, offload_folder=str(given)), tmp_path / "out")
    assert (given / "lm_head.weight.dat").stat().st_size == 6144
    other = make_model("llama", BFLOAT16)
    torch.nn.init.ones_(other.lm_head.weight)
    folder = save_bin(other, tmp_path / "other")
    placed = load(context_for(tmp_path / "b", folder, offload_folder=str(given)), tmp_path / "out2")
    assert_same(state_of(placed), other.state_dict())


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"offload_folder": "{file}"}, ConfigError, "is a file"),
        ({"offload_folder": "{checkpoint}"}, ConfigError, "the checkpoint's own folder"),
        ({"offload_folder": ""}, ConfigError, "'' is no path of a folder"),
        ({"model": {"path": "{root}/gone"}}, CheckpointError, "gone: no such checkpoint"),
        ({"model": {"path": None}}, CheckpointError, "model.path: None"),
    ],
)
def test_a_config_that_cannot_be_carried_out_is_refused(
    tmp_path: Path, checkpoint: Path, change: dict, error: type[Exception], words: str
) -> None:
    tmp_path.joinpath("file").touch()

    def filled(value: object) -> object:
        if isinstance(value, dict):
            return {key: filled(inner) for key, inner in value.items()}
        places = {"file": tmp_path / "file", "checkpoint": checkpoint, "root": tmp_path}
        return value.format(**places) if isinstance(value, str) else value

    context = context_for(tmp_path, checkpoint)
    context.config.update({key: filled(value) for key, value in change.items()})
    faults = list(ShardLoadStage().check(context.config))
    assert [fault.error for fault in faults] == [error]
    assert words in str(faults[0])


def test_the_key_changes_with_the_checkpoint_and_the_folder_alone(tmp_path: Path) -> None:
    folder = save_safetensors(make_model("llama", BFLOAT16), tmp_path / "checkpoint")

    def key(name: str, **config: object) -> str:
        return fingerprint(keyed(ShardLoadStage().gather(context_for(tmp_path / name, folder, **config))))

    first = key("a")
    assert key("b") == first
    assert key("c", offload_folder="x") != first
    assert key("d", offload_state_dict=True) == first, "that changes how it is loaded, and nothing of what is kept"
    shutil.copyfile(folder / "config.json", tmp_path / "config.json")
    folder.joinpath("config.json").write_text("{}")
    assert key("e") != first


def test_a_checkpoint_that_changes_after_its_key_was_made_is_not_loaded(tmp_path: Path) -> None:
    folder = save_safetensors(make_model("llama", BFLOAT16), tmp_path / "checkpoint")
    context = context_for(tmp_path, folder, verify="index")
    inputs = ShardLoadStage().gather(context)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match="changed since the run began"):
        ShardLoadStage().build(inputs, context, tmp_path)


def test_verify_full_keeps_hashes_and_holds_a_later_load_to_them(tmp_path: Path) -> None:
    folder = save_safetensors(make_model("llama", BFLOAT16), tmp_path / "checkpoint", sharded=True)
    context = context_for(tmp_path, folder, verify="full")
    load(context, tmp_path / "out")
    hashes = context.artifact("shard_load").json("load_report.json")["sha256"]
    shards = sorted(folder.glob("*.safetensors"))
    assert hashes == {shard.name: hashlib.sha256(shard.read_bytes()).hexdigest() for shard in shards}
    revive(context)
    before = shards[0].stat()
    content = bytearray(shards[0].read_bytes())
    content[-1] ^= 1
    shards[0].write_bytes(content)
    os.utime(shards[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointError, match=f"{shards[0].name}: its bytes are not those that were verified"):
        revive(context)


@pytest.mark.parametrize("home", ["cpu", "disk"])
@pytest.mark.parametrize("save", [save_safetensors, save_bin])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_check_finite_refuses_what_is_no_number(tmp_path: Path, value: float, save: object, home: str) -> None:
    model = make_model("llama", BFLOAT16)
    with torch.no_grad():
        model.lm_head.weight[3, 4] = value
    folder = save(model, tmp_path / "checkpoint")

    def load_checked(check_finite: bool) -> object:
        config = {"check_finite": check_finite}
        context = make_context(tmp_path, folder, lambda: empty_model("llama", BFLOAT16), lambda name: home, **config)
        return load(context, tmp_path / "out")

    load_checked(False)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    with pytest.raises(CheckpointError, match=r"tensor 'lm_head\.weight' holds NaN or infinity as bfloat16"):
        load_checked(True)


def test_spilled_weights_come_back_and_the_spill_is_gone(tmp_path: Path) -> None:
    model = make_model("opt")
    folder = save_bin(model, tmp_path / "checkpoint", sharded=True, old=True)
    config = {"offload_state_dict": True}
    context = make_context(tmp_path, folder, lambda: empty_model("opt", torch.float32), lambda name: "cpu", **config)
    assert_same(state_of(load(context, tmp_path / "out")), model.state_dict())
    assert not list((tmp_path / "cache" / "offload").iterdir())


def test_kills_while_the_store_is_written_leave_the_next_load_right(tmp_path: Path, checkpoint: Path) -> None:
    processes = multiprocessing.get_context("fork")
    for attempt in range(10):
        context = context_for(tmp_path, checkpoint)
        process = processes.Process(target=load, args=(context, tmp_path / f"killed{attempt}"))
        process.start()
        time.sleep(0.004 * attempt)
        process.kill()
        process.join()
    placed = load(context_for(tmp_path, checkpoint), tmp_path / "out")
    assert_same(state_of(placed), make_model("llama", BFLOAT16).state_dict())


def load_with_small_files(context: FakeContext, out: Path, message: Path) -> None:
    """Load where no file can grow beyond 4000 bytes, and write what the error says to the file ``message``."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
    with pytest.raises(StorageError) as caught:
        load(context, out)
    message.write_text(str(caught.value))


def test_a_write_that_fails_names_the_folder_and_the_bytes_and_leaves_nothing_half_written(
    tmp_path: Path, checkpoint: Path
) -> None:
    arguments = (context_for(tmp_path, checkpoint), tmp_path / "failed", tmp_path / "message")
    process = multiprocessing.get_context("fork").Process(target=load_with_small_files, args=arguments)
    process.start()
    process.join(300)
    words = (tmp_path / "message").read_text()
    assert re.search(r"cache/offload/\w+: writing '[\w.]+' \(6.14 kB\) failed: File too large; free some space", words)
    assert not list(tmp_path.glob("cache/offload/*/.tmp-*"))
    placed = load(context_for(tmp_path, checkpoint), tmp_path / "out")
    assert_same(state_of(placed), make_model("llama", BFLOAT16).state_dict())


def test_too_small_a_disk_is_refused_before_anything_is_written(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    with pytest.raises(StorageError, match=r"21 offloaded tensors need 43.33 kB \(43328 bytes\), and 1.00 kB are free"):
        load(context_for(tmp_path, checkpoint), tmp_path / "out")
    assert not list(tmp_path.glob("cache/offload/*/*.dat"))


def flip_last_bit(path: Path) -> None:
    """Flip a bit of the file, and leave its size and its time as they were."""
    before, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_with_verify_full_a_bit_flipped_in_the_store_is_said_and_mended(
    tmp_path: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = context_for(tmp_path, checkpoint, verify="full")
    before = state_of(load(context, tmp_path / "out"))
    (path,) = tmp_path.glob("cache/offload/*/lm_head.weight.dat")
    flip_last_bit(path)
    assert_same(state_of(revive(context)), before)
    assert "lm_head.weight.dat: doesn't match its checksum (block 0); made again" in caplog.text


@pytest.mark.parametrize("save", [save_safetensors, save_bin])
def test_with_verify_full_what_is_read_in_the_run_is_what_was_hashed(tmp_path: Path, save: object) -> None:
    folder = save(make_model("llama", BFLOAT16), tmp_path / "checkpoint")
    placed = load(context_for(tmp_path, folder, verify="full"), tmp_path / "out")
    file = placed.offloaded.extents["lm_head.weight"].file.path
    placed.offloaded["lm_head.weight"]
    time.sleep(0.02)  # longer than the clock of the file system stands still
    flip_last_bit(file)
    with pytest.raises(CheckpointError, match="changed while it was being served"):
        placed.offloaded["lm_head.weight"]
