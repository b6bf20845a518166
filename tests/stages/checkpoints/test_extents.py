"""An extent, whole or in aligned chunks: every byte of it once."""

from pathlib import Path

import pytest
import torch

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.direct_file import cut
from offstage.stages.checkpoints.dtypes import dtype_name, torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.readers import fill_from, read_extent
from offstage.stages.checkpoints.shard_files import ShardFile

PAGE = 4096


def extent_at(begin: int, count: int, path: Path = Path("weights.bin")) -> Extent:
    size = path.stat().st_size if path.exists() else begin + count
    return Extent(ShardFile(path.name, path, size, None, ""), begin, "uint8", (count,))


@pytest.mark.parametrize("begin", [0, 1, 100, PAGE - 1, PAGE, 3 * PAGE + 7])
@pytest.mark.parametrize("count", [1, 100, PAGE, 2 * PAGE, 5 * PAGE + 1])
def test_chunks_are_aligned_and_bring_each_byte_once(begin: int, count: int) -> None:
    extent = extent_at(begin, count)
    chunks = list(cut(extent, 2 * PAGE))
    brought = [place for chunk in chunks for place in range(chunk.begin, chunk.end)]
    assert brought == list(range(extent.begin, extent.end))
    for chunk in chunks:
        assert chunk.offset % PAGE == chunk.length % PAGE == 0
        assert (chunk.offset + chunk.skipped, chunk.offset + chunk.wanted) == (chunk.begin, chunk.end)
        assert chunk.wanted <= chunk.length <= 2 * PAGE


@pytest.mark.parametrize("begin", [0, 5, PAGE])
def test_an_empty_extent_has_no_chunks(begin: int) -> None:
    assert list(cut(extent_at(begin, 0), PAGE)) == []


def test_a_tensor_is_read_from_its_extent_into_new_memory_or_into_its_own(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(range(200)))
    extent, target = extent_at(13, 50, path), torch.zeros(50, dtype=torch.uint8)
    fill_from(extent, target)
    assert target.tolist() == read_extent(extent).tolist() == list(range(13, 63))
    path.write_bytes(b"another size")
    with pytest.raises(CheckpointError, match="changed while it was being served"):
        read_extent(extent)


def test_dtypes_have_the_names_that_torch_gives_them() -> None:
    assert dtype_name(torch.bfloat16) == dtype_name("torch.bfloat16") == "bfloat16"
    assert torch_dtype("float8_e4m3fn") is torch.float8_e4m3fn
