"""One input changed at a time: what is remade, and that the answer is what an empty cache gives."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import dynamic_module_utils

from tests.e2e.conftest import COMMAND, Finished, enter, environment, records_in
from tests.long_form import in_ci

Run = Callable[..., Finished]
TINY = resources.files("offstage.conf") / "checkpoints" / "tiny"
ALL = ["empty_init", "plan", "shard_load", "dispatch", "generate"]
RATES = "hardware.rates={storage: 1GB, host: 10GB}"
"""Given, since nothing that is tested here goes by what a machine is measured to have."""
MODULES = {
    "net_keyed.py": """
import torch
from helper_keyed import turn

class Net(torch.nn.Module):
    def __init__(self, sign=1.0, order=None):
        super().__init__()
        self.embed = torch.nn.Embedding(48, 16)
        self.head = torch.nn.Linear(16, 48)
        self.sign = sign * (1 if next(iter(order or {"up": 1})) == "up" else -1)

    def forward(self, tokens):
        return turn(self.sign * self.head(self.embed(tokens)))
""",
    "helper_keyed.py": "import deeper_keyed\n\ndef turn(logits):\n    return logits.roll(deeper_keyed.STEPS, -1)\n",
    "deeper_keyed.py": "STEPS = 0\n",
    "stranger_keyed.py": "STEPS = 0\n",
}


PLANNED = ("plan", "dispatch")


def made_again(run: Finished) -> list[str]:
    """Return the stages that a run made; a plan and what follows from it alone go by the memory free just then."""
    made = [name for name, cached in run.cached.items() if not cached]
    return made if made == ALL else [name for name in made if name not in PLANNED]


def edit(name: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: folder.joinpath(name).write_text(MODULES[name].replace(old, new))


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: folder.joinpath(name).write_text(text)


def save_weights(folder: Path, seed: int = 0) -> None:
    torch.manual_seed(seed)
    shapes = {"embed.weight": (48, 16), "head.weight": (48, 16), "head.bias": (48,)}
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "model.safetensors")


def nothing(folder: Path) -> None:
    """Leave the files as they are."""


CHANGES = {
    "nothing": (nothing, [], [], False),
    "an argument": (nothing, ["model.sign=-1.0"], ALL, True),
    "the order inside an argument": (nothing, ["model.order={down: 1, up: 1}"], ALL, True),
    "the class": (edit("net_keyed.py", "turn(self", "turn(-self"), [], ALL, True),
    "a helper": (edit("helper_keyed.py", "roll(", "roll(1 + "), [], ALL, True),
    "what a helper imports": (write("deeper_keyed.py", "STEPS = 5\n"), [], ALL, True),
    "a file that nothing imports": (write("stranger_keyed.py", "STEPS = 7\n"), [], [], False),
    "the weights": (lambda folder: save_weights(folder, seed=1), [], ALL[2:], True),
    "the dtype": (nothing, ["dtype=bfloat16"], ALL, False),
    "the seed": (nothing, ["seed=3"], ALL[4:], False),
    "a prompt": (nothing, ["generate.prompts=[[7,9]]"], ALL[4:], True),
    "the default options": (write("generation_config.json", '{"eos_token_id": 47}'), [], ALL[4:], False),
    "a text that a tokenizer might read": (write("dictionary.txt", "words"), [], ALL[4:], False),
}


@pytest.fixture
def model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in MODULES.items():
        tmp_path.joinpath(name).write_text(text)
    save_weights(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


@pytest.fixture
def run(model_folder: Path, offstage_here: Run) -> Run:
    """Return a function that runs the module's pipeline as a new process would: nothing of it is imported yet."""

    def fresh(*arguments: str) -> Finished:
        for name in MODULES:
            sys.modules.pop(Path(name).stem, None)
        return offstage_here(
            "model=module", "model._target_=net_keyed.Net", "model.path=.", "generate.prompts=[[3,4]]",
            "generate.max_new_tokens=5", *arguments,
        )  # fmt: skip

    return fresh


@pytest.mark.parametrize(
    "change",
    in_ci(
        "nothing", "the class", "what a helper imports", "a file that nothing imports",
        "the weights", "the dtype", "the seed", "a text that a tokenizer might read", of=CHANGES,
    ),
)  # fmt: skip
def test_what_depends_on_a_change_is_remade(change: str, model_folder: Path, run: Run) -> None:
    make, arguments, remade, tells = CHANGES[change]
    first = run()
    assert first.code == 0, first.err
    make(model_folder)
    second, fresh = run(*arguments), run(*arguments, "outputs=outputs/fresh")
    assert (second.code, fresh.code) == (0, 0), second.err
    assert made_again(second) == [name for name in remade if name not in PLANNED or remade == ALL]
    assert second.tokens == fresh.tokens
    assert not any(fresh.cached.values())
    assert (second.tokens != first.tokens) or not tells


@pytest.mark.long_form
def test_variables_that_choose_kernels_are_in_the_key_of_a_generation(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert run(RATES).code == 0
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert not run(RATES).cached["generate"]


REMOTE = {
    "configuration_r.py": "from transformers import LlamaConfig\nclass RConfig(LlamaConfig):\n    model_type = 'r'\n",
    "modeling_r.py": (
        "from transformers import LlamaForCausalLM\nfrom .configuration_r import RConfig\nfrom .scale_r import SCALE\n"
        "class RModel(LlamaForCausalLM):\n    config_class = RConfig\n"
        "    def forward(self, *args, **kwargs):\n        output = super().forward(*args, **kwargs)\n"
        "        output.logits = output.logits * SCALE\n        return output\n"
    ),
    "scale_r.py": "SCALE = 1.0\n",
}


@pytest.fixture
def run_remote(tmp_path: Path, offstage_here: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs the checkpoint ``remote`` as a new process would: none of its code is imported."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def fresh(*arguments: str) -> Finished:
        for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
            del sys.modules[name]
        return offstage_here("model.path=remote", "model.trust_remote_code=true", *arguments)

    return fresh


def test_edited_remote_code_is_another_model(run_remote: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(str(TINY), tmp_path / "remote")
    config = json.loads(folder.joinpath("config.json").read_text())
    auto_map = {"AutoConfig": "configuration_r.RConfig", "AutoModelForCausalLM": "modeling_r.RModel"}
    config |= {"model_type": "r", "architectures": ["RModel"], "auto_map": auto_map}
    folder.joinpath("config.json").write_text(json.dumps(config))
    for name, text in REMOTE.items():
        folder.joinpath(name).write_text(text)
    arguments = ["generate.prompts=[[5,6]]", "generate.max_new_tokens=4", "generate.do_sample=false"]
    first = run_remote(*arguments)
    assert first.code == 0, first.err
    folder.joinpath("scale_r.py").write_text("SCALE = -1.00\n")
    second = run_remote(*arguments)
    assert second.code == 0, second.err
    assert not any(second.cached.values())
    assert second.tokens != first.tokens


def two_tokenizers(folder: Path) -> None:
    """Make ``a/m``, a checkpoint, and ``b/m``, the same with a tokenizer that splits text another way."""
    for name in ("a", "b"):
        shutil.copytree(str(TINY), folder / name / "m")
    file = folder / "b" / "m" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    file.write_text(json.dumps(tokenizer))


def test_a_tokenizer_in_a_folder_of_the_same_name_is_another(offstage_here: Run, tmp_path: Path) -> None:
    two_tokenizers(tmp_path)
    text = ["generate.prompts=['ONCE Upon']", "generate.max_new_tokens=4", "model.path=a/m"]
    own, others = offstage_here(*text), offstage_here(*text, "model.tokenizer=b/m")
    assert (own.code, others.code) == (0, 0), others.err
    assert made_again(others) == ["generate"]
    fresh = offstage_here(*text, "model.tokenizer=b/m", "outputs=outputs/fresh")
    assert others.tokens == fresh.tokens


@pytest.mark.long_form
def test_keys_are_the_same_in_every_process_whatever_its_hash_seed(tmp_path: Path) -> None:
    two_tokenizers(tmp_path)
    asked = ["model.path=a/m", "model.tokenizer=b/m", "max_memory.cpu=1GB", RATES, "generate.max_new_tokens=2"]
    assert enter(tmp_path, *asked) == 0, "with the seed of these tests"
    for seed in ("0", "1", "4242"):  # whoever finds all of the first's artifacts has its keys
        variables = environment({"PYTHONHASHSEED": seed})
        subprocess.run([*COMMAND, *asked], cwd=tmp_path, check=True, env=variables, capture_output=True)
    first, *others = records_in(tmp_path).values()
    assert not any(stage["cached"] for stage in first["stages"])
    for other in others:
        assert all(stage["cached"] for stage in other["stages"])
    keys = {tuple(stage["key"] for stage in record["stages"]) for record in (first, *others)}
    assert len(keys) == 1


@pytest.mark.parametrize("file", in_ci("pytorch_model.bin", of=["model.safetensors", "pytorch_model.bin"]))
def test_checkpoints_that_look_alike_in_two_folders_are_two(run: Run, model_folder: Path, file: str) -> None:
    for seed, name in enumerate(("a", "b")):
        folder = model_folder / name / "m"
        folder.mkdir(parents=True)
        save_weights(folder, seed)
        if file.endswith(".bin"):
            torch.save(load_file(folder / "model.safetensors"), folder / file, _use_new_zipfile_serialization=False)
            folder.joinpath("model.safetensors").unlink()
        os.utime(folder / file, ns=(10**18, 10**18))
    map_to_disk = ["device_map=disk", "dtype=bfloat16", "verify=index"]
    one, other = (run(f"model.path={name}/m", *map_to_disk) for name in ("a", "b"))
    assert (one.code, other.code) == (0, 0), other.err
    assert other.tokens == run("model.path=b/m", *map_to_disk, "outputs=outputs/fresh").tokens
    assert other.tokens != one.tokens


def test_variables_of_one_s_own_change_a_key_only_through_what_is_made_of_them(offstage_here: Run) -> None:
    machine = ("hardware.devices=[]", "+hardware.host.memory=8GB", "generate.max_new_tokens=${vars.words}")
    assert offstage_here(*machine, "vars.words=3").code == 0
    other = offstage_here(*machine, "vars={words: 3, lab: {_target_: os.system, note: unused}}")
    assert (other.code, all(other.cached.values())) == (0, True), other.err
    assert other.record["config"]["vars"] == {"words": 3, "lab": {"_target_": "os.system", "note": "unused"}}
    used = offstage_here(*machine, "vars.words=4")
    assert [name for name, cached in used.cached.items() if not cached][-1] == "generate"
    assert len(used.tokens[0]) == len(other.tokens[0]) + 1


@pytest.mark.long_form
def test_accelerators_of_other_links_or_names_are_another_plan_with_the_same_answer(offstage_here: Run) -> None:
    given = (RATES, "+hardware.host.memory=8GB", "generate.max_new_tokens=3")
    devices = ["{memory: 60MB}", "{memory: 60MB, host_to_device: 1GB}", "{memory: 60MB, name: RTX 3060}"]
    runs = [offstage_here(*given, f"hardware.devices=[{each}]") for each in devices]
    assert [run.code for run in runs] == [0, 0, 0], [run.err for run in runs]
    assert [run.cached["plan"] for run in runs] == [False, False, False]
    assert runs[0].tokens == runs[1].tokens == runs[2].tokens
    assert offstage_here(*given, f"hardware.devices=[{devices[1]}]").cached["plan"]
