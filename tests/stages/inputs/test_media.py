"""Images and audio from files: what is read, and what is refused in one line."""

from __future__ import annotations

import importlib.util
import struct
import wave
import zlib
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from offstage.pipeline.errors import ConfigError
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.inputs.audio import read_audio
from offstage.stages.inputs.images import check_image, read_image
from offstage.stages.inputs.media_files import find_media
from offstage.stages.inputs.processors import load_processor

Image = pytest.importorskip("PIL.Image")


def save_png(file: Path, size: tuple[int, int] = (4, 3), mode: str = "RGB") -> Path:
    values = np.arange(size[0] * size[1] * 3, dtype=np.uint8).reshape(size[1], size[0], 3)
    Image.fromarray(values).convert(mode).save(file, format="PNG")
    return file


def save_wav(file: Path, samples: np.ndarray, *, width: int = 2, channels: int = 1, rate: int = 16000) -> Path:
    whole = (samples * (2 ** (8 * width - 1) - 1)).astype(np.int64) + (128 if width == 1 else 0)
    with wave.open(str(file), "wb") as out:
        out.setparams((channels, width, rate, 0, "NONE", ""))
        out.writeframes(whole.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes())
    return file


def bomb() -> bytes:
    """Return a PNG of some bytes that says it has a quarter of a tera of pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", 500_000, 500_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_an_image_is_read_in_rgb_and_upright(tmp_path: Path) -> None:
    plain = read_image("images", save_png(tmp_path / "a.png"))
    assert (plain.mode, plain.size) == ("RGB", (4, 3))
    assert read_image("images", save_png(tmp_path / "grey.png", mode="L")).mode == "RGB"
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera on its side
    plain.save(tmp_path / "turned.png", exif=exif)
    assert read_image("images", tmp_path / "turned.png").size == (3, 4)


def halved(file: Path) -> bytes:
    data = save_png(file, (40, 40)).read_bytes()
    return data[: len(data) // 2]


BAD_IMAGES: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "text": (lambda file: b"no image at all", "is no image that can be read"),
    "nothing": (lambda file: b"", "is an empty file"),
    "half of one": (halved, "is no image that can be read"),
    "a bomb": (lambda file: bomb(), "could be decompression bomb"),
    "a program for a printer": (lambda file: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n", "is no image"),
}


@pytest.mark.parametrize("case", BAD_IMAGES)
def test_what_is_no_image_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    make, words = BAD_IMAGES[case]
    file = tmp_path / "bad.png"
    file.write_bytes(make(file))
    with pytest.raises(ConfigError, match=words) as caught:
        read_image("forward.images[0]", file)
    assert str(caught.value).startswith("forward.images[0]: ")
    assert "\n" not in str(caught.value)
    if case != "half of one":  # which only decoding shows
        with pytest.raises(ConfigError, match=words):
            check_image("forward.images[0]", file)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_of_every_width_is_read_between_minus_one_and_one(width: int, tmp_path: Path) -> None:
    samples = np.linspace(-0.9, 0.9, 50)
    read = read_audio("audio", save_wav(tmp_path / "a.wav", samples, width=width), rate=16000)
    assert read.dtype == np.float32
    assert np.allclose(read, samples, atol=2.0 ** (2 - 8 * width) + 1e-6)


def test_channels_are_averaged(tmp_path: Path) -> None:
    both = np.stack([np.full(10, 0.5), np.full(10, -0.25)], axis=1).ravel()
    read = read_audio("audio", save_wav(tmp_path / "a.wav", both, channels=2), rate=16000)
    assert np.allclose(read, 0.125, atol=1e-4)
    assert len(read) == 10


def test_a_wav_with_any_byte_of_its_header_damaged_is_read_or_refused(tmp_path: Path) -> None:
    whole, file = save_wav(tmp_path / "a.wav", np.zeros(16)).read_bytes(), tmp_path / "b.wav"
    refused = []
    for place, byte in product(range(44), (0x00, 0x01, 0x7F, 0x80, 0xFF)):
        file.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
        try:
            read_audio("forward.audio[0]", file, rate=16000)
        except ConfigError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all(message.startswith("forward.audio[0]: ") for message in refused)


def test_a_home_that_there_isnt_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"images: '~nouser/x\.png' begins with the home folder of a user"):
        find_media("images", "image", "~nouser/x.png", tmp_path)


def test_what_is_no_audio_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "a.wav"
    wrong_rate = save_wav(tmp_path / "b.wav", np.zeros(8), rate=44100)
    silent = save_wav(tmp_path / "c.wav", np.zeros(0))
    for data, words in ((b"", "is an empty file"), (b"RIFF\x00\x00\x00\x00WAVEjunk", "is no audio that can be read")):
        file.write_bytes(data)
        with pytest.raises(ConfigError, match=words):
            read_audio("forward.audio[0]", file, rate=16000)
    for path, words in (
        (wrong_rate, r"has 44100 Hz and the model takes 16000; resample it \(ffmpeg -ar 16000\)"),
        (silent, "has no samples"),
        (tmp_path / "none.wav", "can't be read: No such file"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_audio("forward.audio[0]", path, rate=16000)


@pytest.mark.skipif(importlib.util.find_spec("soundfile") is not None, reason="soundfile is here")
def test_another_format_names_what_to_install(tmp_path: Path) -> None:
    file = tmp_path / "a.flac"
    file.write_bytes(b"fLaC" + bytes(40))
    with pytest.raises(ConfigError, match=r"needs soundfile, which isn't installed; pip install"):
        read_audio("audio", file, rate=16000)


def test_a_folder_without_a_processor_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"forward.images: .* holds no image processor that loads"):
        load_processor(ModelSource(str(tmp_path)), "image processor", key="forward.images")
