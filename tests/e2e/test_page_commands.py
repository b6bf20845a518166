"""Each command on the pages, run to its end in the folder of a reader who has what they name, in small.

``NOT_RUN`` says which aren't run, and why; ``CHECKPOINTS`` and ``STANDS_FOR``, what stands here for a reader's own.
Of those of offstage that CI doesn't run, it sees that they compose.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import transformers
from hydra import compose, initialize_config_module
from safetensors.torch import save_file
from transformers import AutoTokenizer

from offstage.pipeline import init_command, replay_command
from offstage.pipeline.app import prepare_arguments
from offstage.pipeline.cache import command as cache_command
from offstage.pipeline.config import check, register, resolve
from offstage.pipeline.config_files import HEADER
from offstage.pipeline.installed_stages import installed_stages
from offstage.pipeline.report import command as report_command
from offstage.pipeline.sweeps import command as sweep_command
from offstage.pipeline.sweeps.sweep_keys import register_sweeps
from tests.e2e import checkpoints_of_kinds as kinds, media_checkpoints as media
from tests.e2e.conftest import enter, finish, forked_jobs, records_in, start
from tests.e2e.forked_hosts import run_forks
from tests.e2e.test_forward import save_unet
from tests.long_form import in_ci
from tests.pages import OF_NOW, ROOT, all_commands, blocks, program
from tests.stages.checkpoints.test_gguf_entries import made as make_gguf

TINY = ROOT / "conf/checkpoints/tiny"
NEEDS = {
    "tracker=mlflow": "mlflow", "tracker=trackio": "trackio", "model.adapter": "peft", "lora=": "peft",
    "unet": "diffusers", "images": "PIL", ".gguf": "gguf", "least_budget": "optuna",
}  # fmt: skip
"""The packages without which a command with such a word can't run."""
NOT_RUN: Mapping[str, str] = {
    "python3 -m venv *": "an environment of one's own: test_wheel.py and test_foreign_stage.py make one, offline",
    "*pip install *": "the package index; test_pages.py sees that its extras are there",
    "*/pre-commit install": "it would change this repository",
    "*python -m tests*": "a check or a measurement by hand; test_benchmarks.py has benchmarks' arguments parsed",
    "*python -m pytest *": "the tests themselves",
    "offstage * census.at_least=1000": "test_foreign_stage.py runs it where that stage is installed",
    "python -m offstage.lm_eval*": "test_lm_eval.py runs it",
    "CHECKPOINT=* uvicorn serve:app": "test_server.py runs it",
    "* tracker.uri=http://HOST:5000 *": "needs a server: test_mlflow_server.py has one",
    "mlflow ui *": "it serves pages until it is ended",
    "RANK=0 *": "test_hosts.py starts hosts by these variables",
    "torchrun * --no-python offstage-replay RUN": "test_hosts.py runs it",
    "scontrol requeue": "needs Slurm: test_sweep_slurm.py has one where it is installed",
    "offstage-report --compare": "an option's name, as the next ones: each stands whole on a page",
    "offstage-report --title *": "",
    "offstage-sweep resume": "",
}
"""Which commands aren't run here, by patterns of the shell's, and why."""
LONG = (
    "offstage experiment=",
    "offstage -m stop_after=plan",
    "offstage -m stages=score",
    "offstage -m model.path",
    "offstage -m 'model.path",
    "offstage -m --config-dir",
    "offstage stages=finetune finetune.text_file=README.md",
    "offstage stages=plan_only model.path=/ckpt",
)
"""What the commands begin with that only the long form runs: as CI has others of sweeps, trainings and plans."""
MAINS: Mapping[str, Callable[[], None]] = {
    "offstage-cache": cache_command.main,
    "offstage-init": init_command.main,
    "offstage-replay": replay_command.main,
    "offstage-report": report_command.main,
    "offstage-sweep": sweep_command.main,
}
LISTED = [one for one in all_commands() if not any(fnmatchcase(one, pattern) for pattern in NOT_RUN)]
COMMANDS = [one for one in LISTED if program(one) == "offstage"]
OTHER_COMMANDS = [one for one in LISTED if program(one) in MAINS]
TORCHRUN_COMMANDS = [one for one in LISTED if program(one) == "torchrun"]
IN_CI = [one for one in COMMANDS if not one.startswith(LONG)]
NOT_EVERYWHERE = [
    one for one in COMMANDS if (one not in IN_CI or any(word in one for word in NEEDS)) and "--config-dir" not in one
]
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


def llama(width: int, between: int, layers: int, heads: int) -> Callable[[Path], object]:
    """Return what makes the config of a Llama of these sizes."""
    sizes = {"hidden_size": width, "intermediate_size": between, "num_hidden_layers": layers, "vocab_size": 128256}
    shapes = {**sizes, "num_attention_heads": heads, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    return transformers.LlamaConfig(**shapes, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained


def kept_config(name: str) -> Callable[[Path], object]:
    """Return what makes a folder with the config that is kept here by that ``name``."""

    def make(folder: Path) -> None:
        folder.mkdir()
        shutil.copy(Path(__file__).with_name("configs") / f"{name}.json", folder / "config.json")

    return make


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
    "llama-70b": llama(8192, 28672, 80, 64), "/ckpt/llama-405b": llama(16384, 53248, 126, 128),
    "/ckpt/deepseek-v3": kept_config("deepseek-v3"),
    "/ckpt/llava": lambda folder: media.save(folder, "llava"),
    "/ckpt/whisper": hearing,
    "/ckpt/bge": of_kind(kinds.bert(), "BertModel", kinds.tokenizer()),
    "/ckpt/clip": of_kind(kinds.clip(), "CLIPModel", kinds.clip_processor()),
    "/ckpt/wav2vec2": of_kind(kinds.wav2vec2(), "Wav2Vec2Model", HEARS),
    "/ckpt/my-lora": lora, "/ckpt/sd15/unet": unet,
    "/ckpt/llama-q4_k_m.gguf": gguf_file, "/ckpt/mynet": own_module,
}  # fmt: skip
"""What a reader has by the names that the pages give checkpoints: small ones, and the configs of large ones."""
STANDS_FOR: Mapping[str, str] = {
    "model.path=…": "model.path=/ckpt/llama", "model.path=FOLDER": "model.path=/ckpt/llama", "FOLDER": "/ckpt/llama",
    "RUN_A": "RUN_OF_3MB", "RUN_B": "RUN_OF_8MB", "RUN": "RUN_OF_8MB", "RUN…": "RUN_OF_8MB",
    "outputs/runs/DATE/TIME": "RUN_OF_3MB", "outputs/multirun/DATE/TIME": "SWEEP",
}  # fmt: skip
"""What is put in place of a word that a reader is to replace; ``runs`` makes the runs."""
AS_FILES = (
    ("experiment/packaged.yaml", "experiment=packaged stop_after=plan"),
    ("generate/story.yaml", "generate=story"),
    ("experiment/variables.yaml", "experiment=variables stop_after=plan"),
    ("hardware/lab.yaml", "hardware=lab stages=plan_only"),
    ("experiment/swept.yaml", "experiment=swept stop_after=plan"),
)
"""The file that each block of YAML on its page is to be, and how it is used."""
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


@pytest.fixture
def lab(here: Path) -> Path:
    """Return the folder that offstage-init made for the reader, with a config of the reader's own in its place."""
    if not here.joinpath("lab").exists():
        with pytest.raises(SystemExit, match="0"):
            init_command.main(["lab"])
        shutil.copytree(here / "outputs/cache", here / "lab/outputs/cache")
        here.joinpath("lab/conf/named.yaml").write_text("defaults: [config, _self_]\nmax_memory: {cpu: 3MB}\n")
    return here / "lab"


@pytest.fixture(scope="module")
def runs(reader: Path) -> None:
    """Make the runs and the sweep that commands are about, under the names of ``STANDS_FOR``."""
    asked = "offstage model.path=/ckpt/llama generate.prompts_file=prompts.txt generate.max_new_tokens=2"
    for budget in ("3MB", "8MB"):
        before = records_in(reader)
        assert enter(reader, *given_words(asked, reader), f"max_memory.cpu={budget}") == 0
        (record,) = set(records_in(reader)) - set(before)
        reader.joinpath(f"RUN_OF_{budget}").symlink_to(record.parent)
    with forked_jobs():
        assert enter(reader, "-m", "stop_after=plan", "max_memory.cpu=3MB,8MB", "hydra.sweep.dir=SWEEP") == 0


@pytest.fixture(scope="module")
def hydra_tree() -> Iterator[None]:
    register()
    register_sweeps()
    with initialize_config_module("offstage.conf", version_base="1.3"):
        yield


def have_what_it_needs(command: str) -> None:
    """Skip the test where a package isn't installed that ``command`` needs: importing it may leave something behind."""
    for word, package in NEEDS.items():
        if word in command and importlib.util.find_spec(package) is None:
            pytest.skip(f"could not import '{package}'")


def words_of(command: str) -> list[str]:
    """Return the arguments of ``command``, with what stands here for those that a reader is to replace."""
    return [STANDS_FOR.get(word, word) for word in shlex.split(command)[1:]]


def given_words(command: str, folder: Path) -> list[str]:
    """Return the arguments of ``command``, with the reader's checkpoints, which are made when they're first named."""
    words = words_of(command)
    for place in sorted(CHECKPOINTS, key=len, reverse=True):
        own = folder / place.lstrip("/")
        if any(place in word for word in words) and not own.exists():
            own.parent.mkdir(parents=True, exist_ok=True)
            CHECKPOINTS[place](own)
    placed = [re.sub(r"(?<=[= ])/(?=ckpt/|my/)|^/(?=ckpt/|my/)", f"{folder}/", word) for word in words]
    return [*placed, *([ACCELERATOR] if "max_memory.0=" in command else [])]


@pytest.mark.parametrize("command", in_ci(*IN_CI, of=COMMANDS))
def test_a_command_of_offstage_runs(
    command: str, here: Path, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    have_what_it_needs(command)
    folder = request.getfixturevalue("lab") if "--config-dir" in command else here
    words, before = given_words(command, here), records_in(folder)
    if asks_hydra(words):
        done = finish(start(folder, *words), folder, before)
        assert (done.code, done.err) == (0, "")
        assert "max_memory" in done.out
        return
    assert enter(folder, *words) == 0, capfd.readouterr().err
    new = [record for path, record in records_in(folder).items() if path not in before]
    assert {record["status"] for record in new} <= {"completed"}
    assert new


def asks_hydra(words: list[str]) -> bool:
    """Return whether something is only shown, by Hydra, to a process that then ends."""
    return "--help" in words or "--cfg" in words


@pytest.mark.parametrize("command", NOT_EVERYWHERE)
def test_a_command_that_is_not_run_everywhere_composes_a_config_that_is_sound(command: str, hydra_tree: None) -> None:
    arguments = words_of(command)
    sweep = "-m" in arguments
    asked = [re.sub(r"^(\S+=[^\[{,]*),\S*$", r"\1", one) if sweep else one for one in arguments if one != "-m"]
    config = resolve(compose("config", prepare_arguments(asked)))
    faults = [str(fault) for fault in check(config, list(installed_stages()))]
    assert [fault for fault in faults if "isn't installed" not in fault] == []


@pytest.mark.parametrize("command", TORCHRUN_COMMANDS)
def test_a_command_of_torchrun_runs(command: str, here: Path) -> None:
    words = given_words(f"offstage {command.partition(' -m offstage ')[2]}", here)
    ended = run_forks(here, words, words)
    assert [code for code, _, _ in ended] == [0, 0], [err for _, _, err in ended]


@pytest.mark.parametrize("command", OTHER_COMMANDS)
def test_another_command_runs(
    command: str, here: Path, runs: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, words = program(command), given_words(command, here)
    if name == "offstage-init":  # its folder is one that isn't there yet
        monkeypatch.chdir(tmp_path)
        words = shlex.split(command)[1:]
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(SystemExit) as exit_info:
        MAINS[name]()
    assert not exit_info.value.code


@pytest.mark.parametrize("place", in_ci(*range(len(AS_FILES) - 1), of=range(len(AS_FILES))))
def test_a_file_of_a_page_is_a_config(place: int, lab: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shown = blocks(ROOT / ".github/YAML.md", "yaml")
    assert len(shown) == len(AS_FILES)
    assert not [page.name for page in OF_NOW if page.name != "YAML.md" and blocks(page, "yaml")]
    (name, words), text = AS_FILES[place], shown[place]
    header = "" if HEADER in text or not name.startswith("experiment") else f"{HEADER}\n"
    lab.joinpath("conf", name).parent.mkdir(exist_ok=True)
    lab.joinpath("conf", name).write_text(header + text)
    assert enter(lab, "--config-dir", "conf", *words.split()) == 0, capfd.readouterr().err


def test_the_machine_of_a_page_has_the_plan_that_it_shows(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (shown,) = [text for text in blocks(ROOT / "README.md", "") if "llama-70b stages=plan_only" in text]
    command, *lines = shown.splitlines()
    assert enter(here, *given_words(command.removeprefix("$ "), here)) == 0
    said = capfd.readouterr().out.splitlines()
    assert [line for line in lines if line not in said and not line.startswith("cpu ")] == []


def test_each_command_of_a_page_is_run_here_or_listed_with_why_not() -> None:
    run = [*COMMANDS, *OTHER_COMMANDS, *TORCHRUN_COMMANDS]
    assert [one for one in all_commands() if one not in run and one in LISTED] == []
    assert [each for each in NOT_RUN if not any(fnmatchcase(one, each) for one in all_commands())] == []
    named = {name for reason in NOT_RUN.values() for name in re.findall(r"test_\w+\.py", reason)}
    assert [name for name in named if not list(ROOT.glob(f"tests/**/{name}"))] == []
    assert len(COMMANDS) > 50
