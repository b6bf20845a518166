"""Saved bytes on disk: what was put away is what comes back, and a full disk is one clear error."""

import gc
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offstage.pipeline.errors import StorageError
from offstage.stages.finetune import CPUOffload
from offstage.stages.finetune.disk_store import BLOCK_BYTES, DiskStore, ScratchFile, open_disk_store
from offstage.stages.machine.devices import Devices
from tests.stages.finetune.trained_models import expected, gradients, net, same
from tests.stages.reading_threads import settle

INPUTS = torch.arange(4096 * 32).view(4096, 32) / 2**17
"""Each tensor that is saved has half a MiB."""


def open_store(folder: Path) -> DiskStore:
    return open_disk_store(Devices(), "cpu", folder)


@pytest.mark.parametrize("stays", [0, 1, 100, 5000, 300_000])  # more bytes than a page is, and than torch has itself
@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, BLOCK_BYTES, 2 * BLOCK_BYTES + 5])
def test_what_was_put_away_is_what_comes_back_before_what_stayed(tmp_path: Path, size: int, stays: int) -> None:
    store = open_store(tmp_path)
    sources = [torch.randint(0, 256, (size + number + stays,), dtype=torch.uint8) for number in range(3)]
    parcels = [store.put(source, size + number, None) for number, source in enumerate(sources)]
    wanted = [source.clone() for source in sources]
    for parcel, source in zip(parcels, sources, strict=True):
        assert not parcel.is_leaving
        source.zero_()
    for _ in range(2):
        for parcel in parcels:
            parcel.fetch()
        for parcel, bytes_ in zip(parcels, wanted, strict=True):
            parcel.ready()
            assert parcel.room is not None
            assert torch.equal(parcel.room, bytes_)
            parcel.room = None


def test_the_file_has_no_name_is_used_again_and_closes_with_the_last_that_lies_in_it(tmp_path: Path) -> None:
    def open_files() -> int:
        return len([link for link in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(link)])

    store = open_store(tmp_path)
    for _ in range(5):
        parcels = [store.put(torch.ones(100_000, dtype=torch.uint8), 100_000, None) for _ in range(4)]
        assert open_files() in (2, 3, 4)  # one file: to write and to read, each directly where it may be
        assert list(tmp_path.iterdir()) == []
        last = parcels.pop()
        del parcels
    del store
    gc.collect()
    assert open_files() > 0
    last.fetch()
    last.ready()
    assert last.room is not None
    assert torch.all(last.room == 1)
    del last
    gc.collect()
    assert open_files() == 0


def test_where_direct_writes_are_refused_the_page_cache_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ScratchFile(tmp_path, 8192)
    file._direct = None
    file.write(memoryview(bytes(range(256)) * 32), 0)
    target = torch.zeros(8192, dtype=torch.uint8)
    file.read(target.numpy().data, 0)
    assert target.tolist() == list(range(256)) * 32


def test_a_folder_that_cant_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(StorageError, match=r"file/scratch: taking room for .* of activations failed: Not a directory"),
        CPUOffload(1.0, "unwritable", target="disk", folder=tmp_path / "file" / "scratch"),
    ):
        net()(INPUTS)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MiB, unmounted after the test."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(folder)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs root, and a kernel that lets it mount")
    yield folder
    gc.collect()
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_one_error_in_the_forward_pass_and_leaves_nothing(small_disk: Path) -> None:
    model = net()
    said = rf"{small_disk}: .* No space left on device; free some space there, .* offload_ratio"
    for _ in range(2):
        with pytest.raises(StorageError, match=said), CPUOffload(1.0, "full", target="disk", folder=small_disk):
            model(INPUTS)
    del model
    gc.collect()
    settle()
    assert (list(small_disk.iterdir()), shutil.disk_usage(small_disk).used) == ([], 0)
    model = net()
    for _ in range(3):
        with CPUOffload(0.4, "fits", target="disk", folder=small_disk) as context:
            loss = model(INPUTS.clone()).square().sum()
        loss.backward()
        assert same(gradients(model), expected(INPUTS))
    assert context.traffic["fits"].offloaded_bytes > 2 * 2**20


def test_a_limit_on_the_size_of_files_is_said_as_the_system_says_it(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(StorageError, match=r"taking room for .* of activations failed: File too large"):
            open_store(tmp_path).put(torch.ones(50_000, dtype=torch.uint8), 50_000, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []
