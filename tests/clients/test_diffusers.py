"""A pipeline of diffusers around a model that streams: its pictures are the plain one's, and it is saved whole."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offstage

diffusers = pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diffusers") / "unet"
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    diffusers.UNet2DModel(
        sample_size=8, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4, attention_head_dim=4, **blocks
    ).save_pretrained(folder)
    return folder


def plain(checkpoint: Path, *, aligned: bool = False) -> Any:
    """Return the model in memory. Products of one row in float32 tell where a weight lies, modulo 64 bytes: those of a
    file lie anywhere, and ``aligned`` ones as in a file of their own.
    """
    model = diffusers.UNet2DModel.from_pretrained(checkpoint).eval()
    if aligned:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model


def load(checkpoint: Path) -> Any:
    return offstage.load(checkpoint, device_map={"": "disk"}, cache=checkpoint.with_name("cache"), max_length=8).model


def load_checkpoint_and_dispatch(checkpoint: Path) -> Any:
    with offstage.init_empty_weights():
        model = diffusers.UNet2DModel.from_config(diffusers.UNet2DModel.load_config(checkpoint))
    return offstage.load_checkpoint_and_dispatch(model.eval(), checkpoint, device_map={"": "disk"})


def cpu_offload(checkpoint: Path) -> Any:
    return offstage.cpu_offload(plain(checkpoint), "cpu")


def disk_offload(checkpoint: Path) -> Any:
    return offstage.disk_offload(plain(checkpoint), tempfile.mkdtemp(dir=checkpoint.parent), "cpu")


def around(unet: Any) -> Any:
    pipeline = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(num_train_timesteps=10))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def picture(pipeline: Any) -> np.ndarray[Any, Any]:
    draw = torch.Generator().manual_seed(3)
    image: np.ndarray[Any, Any] = pipeline(generator=draw, num_inference_steps=3, output_type="np").images
    return image


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", [load, load_checkpoint_and_dispatch, cpu_offload, disk_offload])
def test_it_draws_what_the_plain_one_draws_and_is_saved_whole(
    door: Callable[[Path], Any], checkpoint: Path, tmp_path: Path
) -> None:
    expected = picture(around(plain(checkpoint, aligned=door is disk_offload)))
    pipeline = around(door(checkpoint))
    assert (picture(pipeline) == expected).all()
    pipeline.save_pretrained(tmp_path / "saved")
    again = diffusers.DDPMPipeline.from_pretrained(tmp_path / "saved")
    again.set_progress_bar_config(disable=True)
    wanted, saved = plain(checkpoint).state_dict(), again.unet.state_dict()
    assert wanted.keys() == saved.keys()
    assert all(torch.equal(saved[name], value) for name, value in wanted.items())
