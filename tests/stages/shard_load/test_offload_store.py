import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offstage.pipeline.cache import block_sums
from offstage.pipeline.cache.block_sums import INDEX_NAME
from offstage.pipeline.errors import CheckpointError, StorageError
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.shard_load.offload_store import MARKER_NAME, OffloadStore, StoredTensor, open_store, read_index
from tests.long_form import in_ci

TENSOR = StoredTensor("float32", (2,), ("source",))
DATA = memoryview(b"12345678")


def fill(store: OffloadStore, *names: str) -> None:
    for name in names:
        store.put(name, TENSOR, [DATA])
    store.publish()


def test_what_was_put_is_found_by_every_job_that_opens_the_store(tmp_path: Path) -> None:
    fill(open_store(tmp_path / "s", "k"), "a", "b")
    located = open_store(tmp_path / "s", "k").find(dict.fromkeys("abc", TENSOR))
    assert located.keys() == {"a", "b"}
    assert located["a"].file.path.read_bytes() == DATA
    assert json.loads((tmp_path / "s" / INDEX_NAME).read_text())["a"]["dtype"] == "float32"


@pytest.mark.parametrize(
    "wanted",
    [
        StoredTensor("bfloat16", (2,), ("source",)),
        StoredTensor("float32", (1, 2), ("source",)),
        StoredTensor("float32", (2,), ("another",)),
    ],
)
def test_a_tensor_of_another_dtype_shape_or_source_is_not_taken(tmp_path: Path, wanted: StoredTensor) -> None:
    store = open_store(tmp_path, "k")
    fill(store, "a")
    assert not store.find({"a": wanted})


def test_a_tensor_that_was_not_published_or_is_cut_short_is_not_taken(tmp_path: Path) -> None:
    store = open_store(tmp_path, "k")
    fill(store, "a")
    store.put("b", TENSOR, [DATA])
    (tmp_path / "a.dat").write_bytes(b"123")
    assert not open_store(tmp_path, "k").find(dict.fromkeys("ab", TENSOR))


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.dat").write_bytes(b"theirs")
    (tmp_path / INDEX_NAME).write_text(json.dumps({"a": {"dtype": "float32", "shape": [2]}}))
    store = open_store(tmp_path, "k")
    assert store.folder == tmp_path / "k"
    assert not store.find({"a": TENSOR})
    fill(store, "a")
    assert (tmp_path / "a.dat").read_bytes() == b"theirs"
    assert open_store(tmp_path, "k").find({"a": TENSOR})


def test_two_checkpoints_share_a_folder_without_meeting(tmp_path: Path) -> None:
    fill(open_store(tmp_path, "one"), "a")
    other = open_store(tmp_path, "two")
    assert other.folder == tmp_path / "two"
    assert not other.find({"a": TENSOR})
    assert open_store(tmp_path, "one").folder == tmp_path


@pytest.mark.parametrize("mark", [b"", b"{", b"[]", b'{"format": 0, "key": "k"}'])
def test_a_damaged_mark_is_not_trusted(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / MARKER_NAME).write_bytes(mark)
    assert open_store(tmp_path, "k").folder == tmp_path / "k"


def test_a_damaged_index_costs_a_rewrite_and_nothing_else(tmp_path: Path) -> None:
    store = open_store(tmp_path, "k")
    fill(store, "a")
    (tmp_path / INDEX_NAME).write_text("{")
    assert not store.find({"a": TENSOR})
    fill(store, "b")
    assert store.find({"b": TENSOR})


def test_more_than_fits_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    store = open_store(tmp_path, "k")
    with pytest.raises(StorageError) as caught:
        store.check_space(1, 2**62)
    assert str(tmp_path) in str(caught.value)
    assert str(2**62) in str(caught.value)
    assert "offload_folder" in str(caught.value)


def test_a_disk_that_does_not_tell_its_room_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_folder: Path) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(shutil, "disk_usage", unknown)
    store = open_store(tmp_path, "k")
    store.check_space(1, TENSOR.bytes)
    fill(store, "a")
    assert store.find({"a": TENSOR})


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=f"{tmp_path / 'file'}"):
        open_store(tmp_path / "file" / "below", "k")


KILLED = """
import sys, os, pathlib
from offstage.stages.shard_load.offload_store import StoredTensor, open_store
store = open_store(pathlib.Path(sys.argv[1]), "k")
for i in range(10**6):
    store.put(f"t{i % 50}", StoredTensor("float32", (256,), ("s",)), [memoryview(bytes([i % 50]) * 1024)])
    if i % 3 == 0:
        store.publish()
    if i == 5:
        print("started", flush=True)
"""


@pytest.mark.parametrize("delay", in_ci(0.0, 0.023, of=[0.0, 0.011, 0.023, 0.037]))
def test_a_kill_leaves_a_store_that_tells_only_of_whole_tensors(tmp_path: Path, delay: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(delay)
        process.kill()
    tensor = StoredTensor("float32", (256,), ("s",))
    located = open_store(tmp_path, "k").find({f"t{i}": tensor for i in range(50)})
    assert located
    for name, at in located.items():
        assert at.file.path.read_bytes() == bytes([int(name[1:])]) * 1024


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o555)
    with pytest.raises(StorageError, match="set offload_folder to a folder that can be written"):
        open_store(tmp_path / "s", "k")


def flipped(path: Path, at: int) -> None:
    """Flip a bit of the file, and leave its size and its time as they were."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("at", range(8))
def test_a_flipped_bit_is_said_and_the_tensor_not_taken(
    tmp_path: Path, at: int, full: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path, "k")
    fill(store, "a", "b")
    flipped(tmp_path / "a.dat", at)
    assert store.find(dict.fromkeys("ab", TENSOR), full=full).keys() == {"b"}
    assert "a.dat: doesn't match its checksum (block 0); made again" in caplog.text
    fill(store, "a")
    assert store.find(dict.fromkeys("ab", TENSOR), full=full).keys() == {"a", "b"}


def test_every_block_is_compared_where_all_are_and_a_few_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_sums, "BLOCK_BYTES", 16)
    tensor = StoredTensor("uint8", (1000,), ("source",))
    store = open_store(tmp_path, "k")
    store.put("a", tensor, [memoryview(bytes(range(250)) * 4)])
    store.publish()
    assert len(json.loads((tmp_path / INDEX_NAME).read_text())["a"]["blocks"]) == 63
    flipped(tmp_path / "a.dat", 999)
    assert not store.find({"a": tensor}, full=True)
    outcomes = [bool(store.find({"a": tensor})) for _ in range(200)]
    assert 20 < outcomes.count(False) < 180, "16 of 63 blocks are drawn anew at each time"


def test_a_bit_flipped_in_the_index_costs_a_rewrite_and_nothing_else(tmp_path: Path) -> None:
    store = open_store(tmp_path, "k")
    fill(store, "a")
    whole = (tmp_path / INDEX_NAME).read_bytes()
    for at in range(len(whole)):
        flipped(tmp_path / INDEX_NAME, at)
        located = open_store(tmp_path, "k").find({"a": TENSOR}, full=True)
        assert all(at.file.path.read_bytes() == DATA for at in located.values())
        (tmp_path / INDEX_NAME).write_bytes(whole)
    assert store.find({"a": TENSOR}, full=True)


def test_a_file_that_changes_after_all_was_compared_is_noticed_at_its_next_use(tmp_path: Path) -> None:
    store = open_store(tmp_path, "k")
    fill(store, "a")
    extent = store.find({"a": TENSOR}, full=True)["a"]
    assert isinstance(extent, Extent)
    assert read_extent(extent).shape == (2,)
    time.sleep(0.02)  # longer than the clock of the file system stands still
    flipped(extent.file.path, 3)
    with pytest.raises(CheckpointError, match="changed while it was being served"):
        read_extent(extent)


@pytest.mark.parametrize("name", ["a.dat", INDEX_NAME])
def test_a_folder_in_the_place_of_a_file_is_moved_away(tmp_path: Path, name: str) -> None:
    store = open_store(tmp_path, "k")
    fill(store, "a")
    (tmp_path / name).unlink()
    (tmp_path / name).joinpath("inside").mkdir(parents=True)
    assert not store.find({"a": TENSOR})
    fill(store, "a")
    assert store.find({"a": TENSOR})


WRITER = """
import sys
from contextlib import contextmanager
from pathlib import Path
from offstage.stages.shard_load import offload_store
from offstage.stages.shard_load.offload_folder import save_offload_index

@contextmanager
def without_lock(path, **_):
    yield True

offload_store.locked = without_lock  # as where a file system grants a lock to all
folder, own, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
folder.mkdir(exist_ok=True)
store = offload_store.open_store(folder, "k")
tensor = offload_store.StoredTensor("float32", (2,), ("source",))
print("ready", flush=True)
sys.stdin.readline()
for number in range(40):
    name = f"{own}{number}"
    if kind == "store":
        with store.locked():
            store.put(name, tensor, [memoryview(b"12345678")])
            store.publish()
    else:
        save_offload_index({name: {"dtype": "float32", "shape": [2]}}, folder)
"""


@pytest.mark.parametrize("kind", in_ci("store", of=["store", "folder of the field"]))
def test_two_processes_without_locks_lose_no_entry_of_each_other(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "s")]
    root, pipes = Path(__file__).parents[3], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    both = [subprocess.Popen([*command, own, kind], cwd=root, text=True, **pipes) for own in "ab"]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in both:
        process.communicate()
        assert process.returncode == 0
    wanted = {f"{own}{number}" for own in "ab" for number in range(40)}
    assert json.loads((tmp_path / "s" / INDEX_NAME).read_text()).keys() == wanted, "for whoever reads that file alone"
    assert read_index(tmp_path / "s").keys() == wanted
    if kind == "store":
        assert open_store(tmp_path / "s", "k").find(dict.fromkeys(wanted, TENSOR)).keys() == wanted


def test_what_a_killed_writer_was_adding_is_known_and_goes_into_the_index_in_time(tmp_path: Path) -> None:
    store = open_store(tmp_path, "k")
    fill(store, "a", "b")
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".added-")] == []
    added = tmp_path / ".added-elsewhere-1-1.json"
    added.write_text(json.dumps({"b": index.pop("b")}))
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    assert store.find(dict.fromkeys("ab", TENSOR)).keys() == {"a", "b"}
    fill(store, "c")
    assert added.exists(), "its writer may still be at work"
    assert json.loads((tmp_path / INDEX_NAME).read_text()).keys() == {"a", "b", "c"}
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    os.utime(added, (time.time() - 2 * 24 * 3600,) * 2)
    with store.locked():
        assert not added.exists()
    assert store.find(dict.fromkeys("abc", TENSOR)).keys() == {"a", "b", "c"}
