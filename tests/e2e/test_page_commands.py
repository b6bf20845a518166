"""Each command on the pages, run to its end in the folder of a reader who has what they name, in small.

``NOT_RUN`` says which aren't run, and why; of these, ``tests/test_pages.py`` sees that they compose.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import save_file
from transformers import AutoTokenizer

from offstage.pipeline import replay_command
from offstage.pipeline.cache import command as cache_command
from offstage.pipeline.report import command as report_command
from tests.e2e import checkpoints_of_kinds as kinds, media_checkpoints as media
from tests.e2e.conftest import enter, records_in
from tests.e2e.forked_hosts import run_forks
from tests.e2e.test_forward import save_unet
from tests.long_form import in_ci
from tests.stages.checkpoints.test_gguf_entries import made as make_gguf
from tests.test_pages import COMMANDS, OTHER_COMMANDS, TORCHRUN_COMMANDS

TINY = Path(__file__).parents[2] / "conf/checkpoints/tiny"
NEEDS = {
    "tracker=mlflow": "mlflow", "tracker=trackio": "trackio", "model.adapter": "peft", "lora=": "peft",
    "unet": "diffusers", "images": "PIL", ".gguf": "gguf", "least_budget": "optuna",
}  # fmt: skip
"""The packages without which a command with such a word can't run."""
NOT_RUN: Mapping[str, str] = {
    "tracker.uri=http://HOST:5000": "needs a server: test_mlflow_server has one",
    "offstage-init lab": "test_init_command runs it, and each command of the page that it is on",
}
LONG = (
    "offstage experiment=",
    "offstage -m stop_after=plan",
    "offstage -m stages=score",
    "offstage -m model.path",
    "offstage stages=finetune finetune.text_file=README.md",
)
"""What the commands begin with that only the long form runs: sweeps and a training, as others have them in CI."""
MAINS: Mapping[str, Callable[[], None]] = {
    "offstage-cache": cache_command.main,
    "offstage-replay": replay_command.main,
    "offstage-report": report_command.main,
}
OWN = """
import torch

class MyNet(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = torch.nn.Embedding(8000, width)
        self.out = torch.nn.Linear(width, 8000)

    def forward(self, input_ids):
        return self.out(self.embed(input_ids))
"""
ACCELERATOR = "hardware.devices=[{memory: 24GB}]"
"""What a reader has who gives ``max_memory.0``."""


def config_alone(folder: Path) -> None:
    """Make the embedded checkpoint without its weights."""
    folder.mkdir()
    shutil.copy(TINY / "config.json", folder)


def of_kind(config: Any, kind: str, *beside: Any) -> Callable[[Path], object]:
    """Return what makes a checkpoint of that class."""
    return lambda folder: kinds.save(folder, config, kind, *beside)


def own_module(folder: Path) -> None:
    """Make a checkpoint of a module that isn't transformers', which lies in the reader's folder."""
    Path("mypackage.py").write_text(OWN)
    made: dict[str, Any] = {}
    exec(OWN, made)
    folder.mkdir()
    save_file(made["MyNet"](width=64).state_dict(), folder / "model.safetensors")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)


def gguf_file(file: Path) -> None:
    """Make a Llama in a GGUF file."""
    make_gguf(file.parent, "llama").rename(file)


def hearing(folder: Path) -> None:
    """Make a Whisper of several languages."""
    media.tell_languages(media.save(folder, "whisper"))


def tiny(folder: Path) -> None:
    """Make a copy of the embedded checkpoint."""
    shutil.copytree(TINY, folder)


def lora(folder: Path) -> None:
    """Make an adapter of the embedded checkpoint."""
    import peft

    model = transformers.AutoModelForCausalLM.from_pretrained(TINY)
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(folder)


def unet(folder: Path) -> None:
    """Make a UNet, and latents for it in the reader's folder."""
    save_unet(folder, Path("latents.safetensors"))


HEARS = transformers.Wav2Vec2FeatureExtractor()
CHECKPOINTS: Mapping[str, Callable[[Path], object]] = {
    "/ckpt/llama": tiny, "/ckpt/llama-70b-fp8": tiny, "/ckpt/opt-13b": tiny, "/my/llama": tiny, "/ckpt/llama-7b": tiny,
    "llama-70b": config_alone, "/ckpt/llama-405b": config_alone, "/ckpt/deepseek-v3": config_alone,
    "/ckpt/llava": lambda folder: media.save(folder, "llava"),
    "/ckpt/whisper": hearing,
    "/ckpt/bge": of_kind(kinds.bert(), "BertModel", kinds.tokenizer()),
    "/ckpt/clip": of_kind(kinds.clip(), "CLIPModel", kinds.clip_processor()),
    "/ckpt/wav2vec2": of_kind(kinds.wav2vec2(), "Wav2Vec2Model", HEARS),
    "/ckpt/my-lora": lora, "/ckpt/sd15/unet": unet,
    "/ckpt/llama-q4_k_m.gguf": gguf_file, "/ckpt/mynet": own_module,
}  # fmt: skip
TEXT = "Weights wait offstage until their cue. " * 60


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, described: Path) -> Path:
    """Return the folder of a reader, with the files that the pages' commands name; its cache knows this machine."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(described, folder / "outputs/cache")
    folder.joinpath("many.jsonl").write_text('{"prompt": "Once"}\n{"prompt": "The end of"}\n')
    folder.joinpath("prompts.txt").write_text("Once upon a time\n\nThe end of\n")
    folder.joinpath("texts.txt").write_text("weights wait\n\noffstage\n")
    for name in ("wiki.txt", "notes.txt", "README.md"):
        folder.joinpath(name).write_text(TEXT)
    for name in ("a.wav", "talk.wav"):
        media.recording(folder / name)
    if importlib.util.find_spec("PIL"):
        for name in ("a.png", "cat.png"):
            media.picture(folder / name)
    return folder


@pytest.fixture
def here(reader: Path, monkeypatch: pytest.MonkeyPatch, jobs_fork: None) -> Path:
    """Return the reader's folder, the current one; the jobs of sweeps and replays are forks."""
    monkeypatch.chdir(reader)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return reader


def have_what_it_needs(command: str) -> None:
    """Skip the test where a package isn't installed that ``command`` needs: importing it may leave something behind."""
    for word, package in NEEDS.items():
        if word in command and importlib.util.find_spec(package) is None:
            pytest.skip(f"could not import '{package}'")


def given_words(command: str, folder: Path) -> list[str]:
    """Return the arguments of ``command``, with the reader's checkpoints, which are made when they're first named."""
    words = shlex.split(command, comments=True)[1:]
    for place in sorted(CHECKPOINTS, key=len, reverse=True):
        own = folder / place.lstrip("/")
        if place in command and not own.exists():
            own.parent.mkdir(parents=True, exist_ok=True)
            CHECKPOINTS[place](own)
    placed = [re.sub(r"(?<=[= ])/(?=ckpt/|my/)|^/(?=my/)", f"{folder}/", word) for word in words]
    return [*placed, *([ACCELERATOR] if "max_memory.0=" in command else [])]


RUN = [one for one in COMMANDS if not any(word in one for word in NOT_RUN)]


@pytest.mark.parametrize("command", in_ci(*(one for one in RUN if not one.startswith(LONG)), of=RUN))
def test_a_command_of_a_page_runs(command: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    have_what_it_needs(command)
    words = given_words(command, here)
    before = records_in(here)
    assert enter(here, *words) == 0, capfd.readouterr().err
    new = [record for path, record in records_in(here).items() if path not in before]
    assert {record["status"] for record in new} <= {"completed"}
    assert new


@pytest.mark.parametrize("command", TORCHRUN_COMMANDS)
def test_a_command_of_torchrun_on_a_page_runs(command: str, here: Path) -> None:
    words = given_words(f"offstage {command.partition(' -m offstage ')[2]}", here)
    ended = run_forks(here, words, words)
    assert [code for code, _, _ in ended] == [0, 0], [err for _, _, err in ended]


@pytest.fixture(scope="module")
def runs(reader: Path) -> Mapping[str, str]:
    """Return what stands for the places in commands that are for runs of the reader's own."""
    for budget in ("3MB", "8MB"):
        words = given_words("offstage model.path=/ckpt/llama generate.prompts_file=prompts.txt", reader)
        assert enter(reader, *words, f"max_memory.cpu={budget}", "generate.max_new_tokens=2") == 0
    first, second = sorted(reader.glob("outputs/runs/*/*/run.json"))[-2:]
    a, b = str(first.parent), str(second.parent)
    return {
        "outputs/multirun/DATE/TIME": a, "outputs/runs/DATE/TIME": a, "RUN_A": a, "RUN_B": b, "RUN": b,
        "FOLDER": str(reader / "ckpt/llama"), "run.tar.gz": "run.tar.gz",
    }  # fmt: skip


@pytest.mark.parametrize("command", [one for one in OTHER_COMMANDS if one not in NOT_RUN])
def test_another_command_of_a_page_runs(
    command: str, here: Path, runs: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = command.partition(" ")[0]
    words = [runs.get(word, word) for word in given_words(command, here)]
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(SystemExit) as exit_info:
        MAINS[name]()
    assert not exit_info.value.code


def test_what_is_not_run_is_on_a_page() -> None:
    assert [word for word in NOT_RUN if not any(word in one for one in (*COMMANDS, *OTHER_COMMANDS))] == []
