"""Prompts with images and audio: the tokens of transformers' own generate on the plain model, and clear refusals."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from tests.e2e.conftest import Finished, Replay
from tests.e2e.media_checkpoints import picture, recording, save, tell_languages
from tests.long_form import in_ci, in_part
from tests.stages.inputs.test_media import bomb

pytest.importorskip("PIL.Image")

TEXTS = {
    "llava": "What is <image> here?",
    "idefics3": "<image> or not",
    "paligemma": "describe",
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>what",
    "whisper": "",
}
NEEDS = {"qwen2_vl": "torchvision"}
if "torchvision" in getattr(hf.Idefics3ImageProcessorPil, "_backends", ()):  # as in transformers 5.17, by its own slip
    NEEDS["idefics3"] = "torchvision"
WAYS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "greedy": ({}, ()),
    "sampled": (
        {"do_sample": True, "temperature": 0.9},
        ("generate.do_sample=true", "+generate.temperature=0.9", "seed=5"),
    ),
    "beams": ({"num_beams": 3}, ("+generate.num_beams=3",)),
    "bfloat16": ({}, ("dtype=bfloat16",)),
}
"""By each name the options of transformers' generate, and ours."""
ALL_WAYS = tuple(WAYS)


def plain_tokens(folder: Path, name: str, media: Path, way: str) -> list[int]:
    """Return the new tokens that transformers' own generate gives for the prompt, on the model in memory."""
    processor, dtype = hf.AutoProcessor.from_pretrained(folder), getattr(torch, way, torch.float32)
    if name == "whisper":
        model = hf.AutoModelForSpeechSeq2Seq.from_pretrained(folder, dtype=dtype)
        with wave.open(str(media)) as file:
            sound = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 2**15
        inputs, before = processor(sound, sampling_rate=16000, return_tensors="pt"), 0
    else:
        model = hf.AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
        image = hf.image_utils.load_image(str(media))
        inputs = processor(images=[[image]], text=TEXTS[name], return_tensors="pt")
        before = inputs["input_ids"].shape[1]
    torch.manual_seed(5)
    options = {"max_new_tokens": 8, "do_sample": False, **WAYS[way][0]}
    return model.generate(**inputs.to(dtype), **options)[0, before:].tolist()


@pytest.mark.parametrize(
    ("name", "ways"),
    in_ci(
        ("llava", ALL_WAYS), *[(name, ("greedy",)) for name in ("qwen2_vl", "whisper")],
        of=[(name, ways) for name in TEXTS for ways in (("greedy",), ALL_WAYS)],
    ),
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)  # fmt: skip
def test_what_a_model_sees_or_hears_is_answered_as_it_is_in_memory(
    name: str, ways: Sequence[str], tmp_path: Path, offstage_here: Callable[..., Finished]
) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    folder = save(tmp_path / "checkpoint", name)
    media = recording(tmp_path / "a.wav") if name == "whisper" else picture(tmp_path / "a.png")
    key = "audio" if name == "whisper" else "images"
    given = {**({"prompt": TEXTS[name]} if TEXTS[name] else {}), key: [media.name]}
    tmp_path.joinpath("prompts.jsonl").write_text(json.dumps(given))
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    fixed = (f"model.path={folder}", f"max_memory.cpu={size // 2}", "storage.io=direct", "generate.chat=false")
    asked = ("generate.prompts_file=prompts.jsonl", "generate.max_new_tokens=8")
    done = {way: offstage_here(*fixed, *asked, *WAYS[way][1]) for way in ways}
    assert all(run.code == 0 for run in done.values()), [run.err for run in done.values()]
    record = done["greedy"].record
    assert record["metrics"]["streamed_bytes_per_token"] > 0, "nothing lay on disk: the test proves nothing"
    for way, run in done.items():
        assert run.tokens == [plain_tokens(folder, name, media, way)], way
    assert [file["path"] for file in record["outputs"][0]["prompt"][key]] == [str(media)]


def test_whisper_takes_its_own_options(tmp_path: Path, offstage_here: Callable[..., Finished]) -> None:
    folder, media = save(tmp_path / "checkpoint", "whisper"), recording(tmp_path / "a.wav")
    tell_languages(folder)
    prompts = f"generate.prompts=[{{audio: {media}, language: en, task: transcribe}}, {{audio: {media}, language: 3}}]"
    refused = offstage_here(f"model.path={folder}", prompts)
    assert refused.code == 2
    assert "generate.prompts[1].language: 3 is no text" in refused.err
    done = offstage_here(
        f"model.path={folder}", f"generate.prompts=[{{audio: {media}}}]", "generate.max_new_tokens=6",
        "+generate.language=en", "+generate.task=transcribe",
    )  # fmt: skip
    assert done.code == 0, done.err
    model = hf.WhisperForConditionalGeneration.from_pretrained(folder)
    with wave.open(str(media)) as recorded:
        sound = np.frombuffer(recorded.readframes(recorded.getnframes()), "<i2").astype(np.float32) / 2**15
    inputs = hf.AutoProcessor.from_pretrained(folder)(sound, sampling_rate=16000, return_tensors="pt")
    plain = model.generate(**inputs, max_new_tokens=6, do_sample=False, language="en", task="transcribe")
    assert done.tokens == plain.tolist()
    assert done.record["outputs"][0]["text"] is not None


@pytest.fixture
def seeing(tmp_path: Path) -> Path:
    picture(tmp_path / "a.png")
    return save(tmp_path / "llava", "llava")


def test_messages_and_text_meet_in_one_template(seeing: Path, offstage_here: Callable[..., Finished]) -> None:
    parts = "[{type: image, path: a.png}, {type: text, text: Look}]"
    bare = "[{type: image}, {type: text, text: Look}]"
    prompts = [
        "{prompt: Look, images: [a.png]}",
        f"{{messages: [{{role: user, content: {parts}}}]}}",
        f"{{messages: [{{role: user, content: {bare}}}], images: a.png}}",
        "{prompt: '<image>Look', images: [a.png]}",
    ]
    done = offstage_here(
        f"model.path={seeing}", f"generate.prompts=[{','.join(prompts)}]", "generate.max_new_tokens=6", "dtype=float32"
    )
    assert done.code == 0, done.err
    assert done.tokens[0] == done.tokens[1] == done.tokens[2] == done.tokens[3]
    assert [output["batch"] for output in done.record["outputs"]] == [0, 1, 2, 3], "each is decoded alone"
    processor = hf.AutoProcessor.from_pretrained(seeing)
    chat = [{"role": "user", "content": [{"type": "image", "path": "a.png"}, {"type": "text", "text": "Look"}]}]
    inputs = processor.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    model = hf.AutoModelForImageTextToText.from_pretrained(seeing)
    expected = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert done.tokens[0] == expected.tolist()


def test_text_and_images_in_one_run_are_each_answered_as_alone(
    seeing: Path, offstage_here: Callable[..., Finished]
) -> None:
    image = "{prompt: '<image>Look', images: [a.png], max_new_tokens: 3}"
    fixed = (f"model.path={seeing}", "generate.chat=false", "generate.max_new_tokens=5", "max_memory.cpu=150KB")
    mixed = offstage_here(
        *fixed, f"generate.prompts=[One,{image},{{token_ids: [9, 8, 7]}}]", "generate.batch_size=auto"
    )
    assert mixed.code == 0, mixed.err
    assert len({output["batch"] for output in mixed.record["outputs"]}) == 2, (
        "the texts share a batch, the image is alone"
    )
    alone = offstage_here(*fixed, f"generate.prompts=[{image}]")
    assert mixed.tokens[1] == alone.tokens[0]
    assert [len(tokens) for tokens in mixed.tokens] == [5, 3, 5]


@pytest.mark.long_form
def test_another_image_is_another_generation_and_a_replay_says_so(
    seeing: Path, tmp_path: Path, offstage_here: Callable[..., Finished], replay: Replay
) -> None:
    asked = (
        f"model.path={seeing}",
        "max_memory.cpu=1GB",
        "storage.io=direct",
        "generate.prompts=[{prompt: '<image>Look', images: [a.png]}]",
        "generate.chat=false",
    )
    first, again = offstage_here(*asked), offstage_here(*asked)
    assert (first.cached["generate"], again.cached["generate"]) == (False, True)
    run = next(tmp_path.glob("outputs/runs/*/*/run.json")).parent
    code, out, err = replay(run)
    assert code == 0, out + err
    picture(tmp_path / "a.png", seed=1)
    changed = offstage_here(*asked)
    assert not changed.cached["generate"]
    assert changed.tokens != first.tokens
    code, out, err = replay(run)
    assert code == 1, out + err
    assert "generate.prompts[0].media[0].sha256: was " in out


NO_WAV = "text.png', which is no WAV, needs soundfile"
if find_spec("soundfile") is not None:
    NO_WAV = "text.png' is no audio that can be read: ValueError: Format not recognised"
BAD: dict[str, tuple[str, str, str]] = {
    "text for an image": (
        "llava",
        "{prompt: '<image>', images: [text.png]}",
        "text.png' is no image that can be read",
    ),
    "a missing file": (
        "llava",
        "{prompt: '<image>', images: [gone.png]}",
        "generate.prompts[0].images[0]: '",
    ),
    "a decompression bomb": ("llava", "{prompt: '<image>', images: [bomb.png]}", "could be decompression bomb"),
    "a folder": ("llava", "{prompt: '<image>', images: [llava]}", "not a regular file"),
    "no place": ("llava", "{prompt: Look, images: [a.png]}", "<image>"),
    "a hearing model's file": ("llava", "{prompt: Look, audio: [a.wav]}", "takes no audio"),
    "an image for text": ("text", "{prompt: Look, images: [a.png]}", "generate.prompts[0]: the checkpoint in"),
    "audio for text": ("text", "{prompt: Look, audio: [a.wav]}", "takes no audio"),
    "text for a hearing model": ("whisper", "[5, 6]", "generate.prompts[0]: the model takes no text alone"),
    "text beside audio": ("whisper", "{prompt: Hello, audio: [a.wav]}", "takes no text beside audio: 'Hello'"),
    "another rate": ("whisper", "{audio: [slow.wav]}", "has 8000 Hz and the model takes 16000"),
    "a long one": ("whisper", "{audio: [long.wav]}", "lasts 31.0 s, and the model hears 30 s at once"),
    "no audio": ("whisper", "{audio: [text.png]}", NO_WAV),
    "an address": (
        "llava",
        "{messages: [{role: user, content: [{type: image, url: 'http://x/y.png'}]}]}",
        "nothing is",
    ),
    "no file for a part": ("llava", "{messages: [{role: user, content: [{type: image}]}]}", "no file for this image"),
    "a file for no part": (
        "llava",
        "{messages: [{role: user, content: Hi}], images: [a.png]}",
        "no part of them is for",
    ),
    "token ids": ("llava", "{token_ids: [5], images: [a.png]}", "stand beside text, not beside token_ids"),
    "one place for two": ("llava", "{prompt: 'A <image>', images: [a.png, a.png]}", "<image>"),
}


@pytest.mark.parametrize("case", in_part(BAD))
def test_a_file_that_does_not_do_is_one_line_before_any_weight_is_read(
    case: str, tmp_path: Path, offstage_here: Callable[..., Finished]
) -> None:
    name, prompt, words = BAD[case]
    picture(tmp_path / "a.png")
    recording(tmp_path / "a.wav")
    recording(tmp_path / "slow.wav", rate=8000)
    recording(tmp_path / "long.wav", seconds=31)
    tmp_path.joinpath("text.png").write_text("no image")
    tmp_path.joinpath("bomb.png").write_bytes(bomb())
    chosen = [] if name == "text" else [f"model.path={save(tmp_path / name, name)}"]
    done = offstage_here(*chosen, f"generate.prompts=[{prompt}]", "generate.chat=false")
    assert done.code == 2, done.err
    assert len(done.err.strip().splitlines()) == 1, done.err
    assert words in done.err
    assert not tmp_path.joinpath("outputs/cache/shard_load").exists()
