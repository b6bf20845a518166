import mmap
import os
import resource
from pathlib import Path

import pytest
import torch

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.direct_file import DirectFile
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.dispatch.streaming.mapped_weights import MappedFile

VALUES = torch.arange(6, dtype=torch.float32)


@pytest.fixture
def file(tmp_path: Path) -> ShardFile:
    path = tmp_path / "shard"
    path.write_bytes(b"head" + VALUES.numpy().tobytes() + b"x" + VALUES.numpy().tobytes())
    return ShardFile(path.name, path, path.stat().st_size, path.stat().st_mtime_ns, "")


@pytest.mark.parametrize("begin", [4, 4 + 24 + 1], ids=["aligned", "at an odd offset"])
def test_a_tensor_is_what_lies_in_the_file(file: ShardFile, begin: int) -> None:
    mapped = MappedFile(file)
    extent = Extent(file, begin, "float32", (2, 3))
    assert torch.equal(mapped.tensor(extent, mmap.MADV_WILLNEED), VALUES.view(2, 3))
    mapped.close()


def test_a_tensor_outlives_the_file_and_what_is_written_into_it_stays_out_of_the_file(file: ShardFile) -> None:
    before = file.path.read_bytes()
    mapped = MappedFile(file)
    tensor = mapped.tensor(Extent(file, 4, "float32", (6,)), mmap.MADV_RANDOM)
    mapped.close()
    tensor.zero_()
    assert file.path.read_bytes() == before


def test_an_empty_tensor_needs_no_byte(file: ShardFile) -> None:
    mapped = MappedFile(file)
    assert mapped.tensor(Extent(file, 4, "float32", (0, 3)), mmap.MADV_RANDOM).shape == (0, 3)
    mapped.close()


def test_a_file_cut_short_is_noticed_before_a_page_of_it_is_touched(file: ShardFile) -> None:
    mapped = MappedFile(file)
    os.truncate(file.path, 8)
    with pytest.raises(CheckpointError, match="the file changed while it was being served"):
        mapped.check()
    mapped.close()


def test_a_map_that_there_is_no_room_for_names_its_file(file: ShardFile) -> None:
    large = 2**42
    os.truncate(file.path, large)
    status = file.path.stat()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (large // 2, before[1]))
    try:
        with pytest.raises(OSError, match=f"Cannot allocate memory: '{file.path}'"):
            MappedFile(ShardFile(file.name, file.path, large, status.st_mtime_ns, ""))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_file_that_cannot_be_closed_is_nothing_to_its_user(file: ShardFile) -> None:
    direct = DirectFile(file)
    os.close(direct.descriptor)
    direct.close()
