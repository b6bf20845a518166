from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.shard_load.packer import InFiles


def open_files() -> list[str]:
    """Return what the descriptors of this process are open on."""
    return [str(path.resolve()) for path in Path("/proc/self/fd").iterdir()]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="this system doesn't tell what is open")
def test_where_one_file_of_a_tensor_cannot_be_opened_none_stays_open(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    extent = open_checkpoint(tmp_path).entries["a"]
    assert isinstance(extent, Extent)
    gone = replace(extent, file=replace(extent.file, name="gone", path=tmp_path / "gone"))
    with pytest.raises(CheckpointError, match="gone") as caught:
        InFiles([extent, gone])
    assert str(extent.file.path) not in open_files(), "though the error, and what it passed through, is held"
    assert caught.tb is not None
