"""Audio from files: WAV by Python's own reader, other formats by soundfile where it is installed.

Nothing is resampled: which filter to use is a choice that changes what a model hears.
"""

from __future__ import annotations

import wave
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from offstage.pipeline.errors import ConfigError, foreign
from offstage.stages.inputs.media_files import read_media, require

MOST_SAMPLES = 2**28
"""Of all channels together: four and a half hours at 16 kHz. Silence takes next to nothing in a compressed file."""

Samples = npt.NDArray[np.float32]


def read_audio(key: str, file: Path, *, rate: int, sha256: str | None = None) -> Samples:
    """Return the samples in ``file``, float32 from -1 to 1 of shape (samples,): the mean of its channels.

    A ``ConfigError`` that begins with ``key`` where the file is no audio, or its sampling rate isn't ``rate`` in Hz.
    ``sha256`` is the hash that its content must have.
    """
    data = read_media(key, file, sha256=sha256)
    about = f"{key}: {str(file)!r} is no audio that can be read"
    if not _is_pcm(data) and (data[:4] != b"RIFF" or find_spec("soundfile") is not None):
        require(key, "soundfile", f"reading {str(file)!r}, which is no WAV, needs soundfile")
        with foreign(ConfigError, about):
            samples, file_rate = _by_soundfile(data)
    else:
        with foreign(ConfigError, about, advice="; without soundfile, give WAV with whole numbers as samples"):
            samples, file_rate = _by_wave(data)
    if file_rate != rate:
        raise ConfigError(
            f"{key}: {str(file)!r} has {file_rate} Hz and the model takes {rate}; resample it (ffmpeg -ar {rate})"
        )
    if not len(samples):
        raise ConfigError(f"{key}: {str(file)!r} has no samples; give audio that isn't empty")
    return np.ascontiguousarray(samples.mean(axis=1, dtype=np.float32))


def _is_pcm(data: bytes) -> bool:
    """Return whether ``data`` is WAV whose samples are whole numbers: what Python's own reader knows."""
    try:
        with wave.open(BytesIO(data)):
            return True
    except Exception:  # noqa: BLE001 - of damaged headers its reader raises what it likes
        return False


def _by_wave(data: bytes) -> tuple[Samples, int]:
    with wave.open(BytesIO(data)) as file:
        channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
        frames = np.frombuffer(file.readframes(file.getnframes()), np.uint8)
    numbers = frames[: len(frames) // (width * channels) * (width * channels)].reshape(-1, width)
    if width == 1:  # the one width whose samples have no sign
        return ((numbers.astype(np.float32) - 128) / 128).astype(np.float32).reshape(-1, channels), rate
    wide = np.zeros((len(numbers), 4), np.uint8)
    wide[:, 4 - width :] = numbers
    return (wide.view("<i4").astype(np.float64) / 2**31).astype(np.float32).reshape(-1, channels), rate


def _by_soundfile(data: bytes) -> tuple[Samples, int]:
    import soundfile

    try:
        with soundfile.SoundFile(BytesIO(data)) as file:
            if file.frames * file.channels > MOST_SAMPLES:
                raise ValueError(f"{file.frames * file.channels} samples are more than {MOST_SAMPLES}")
            return file.read(dtype="float32", always_2d=True), int(file.samplerate)
    except soundfile.LibsndfileError as error:  # before its reason it names the object that it read
        raise ValueError(error.error_string) from error
