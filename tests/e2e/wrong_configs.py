"""Configs that are wrong as people write them, each with the lines that it gets: ``python -m tests.e2e.wrong_configs``.

Each line says which key or file, what was received, the rule, and what to do next.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from offstage.pipeline.config_files import HEADER

FOLDER = "FOLDER"
"""Stands in lines for the folder that the command runs in."""
_MINE = "conf/experiment/mine.yaml"


@dataclass(frozen=True, slots=True)
class WrongConfig:
    """What is given, in words and as arguments and files, the lines that it gets and the exit code."""

    name: str
    command: str
    lines: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    code: int = 2

    @property
    def arguments(self) -> list[str]:
        """The arguments as a shell passes them on."""
        return shlex.split(self.command)


def typed(name: str, command: str, *lines: str, code: int = 2) -> WrongConfig:
    """Return what is wrong with a command alone."""
    return WrongConfig(name, command, lines, code=code)


def experiment(name: str, text: str, *lines: str) -> WrongConfig:
    """Return what is wrong with an experiment of one's own that has ``text`` below its header."""
    return WrongConfig(name, "--config-dir conf experiment=mine", lines, {_MINE: f"{HEADER}\n{text}"})


WRONG_CONFIGS = (
    typed("a misspelt key", "max_memry.cpu=2MB",
        "max_memry.cpu: unknown key (did you mean 'max_memory'?); offstage --cfg job shows every key"),
    typed("a misspelt key of a group", "generate.max_new_token=3",
        "generate.max_new_token: no such option (did you mean 'max_new_tokens'?); see GenerationConfig"),
    typed("a misspelt key of the measurement", "measure.repeat=3",
        "measure.repeat: unknown key (did you mean 'repeats'?); offstage --cfg job shows every key"),
    typed("several misspelt keys", "max_memry.cpu=2MB sed=1 dtyp=float16",
        "max_memry.cpu: unknown key (did you mean 'max_memory'?); offstage --cfg job shows every key",
        "sed: unknown key (did you mean 'seed'?); offstage --cfg job shows every key",
        "dtyp: unknown key (did you mean 'dtype'?); offstage --cfg job shows every key"),
    experiment("a misspelt key in a file", "max_memroy: {cpu: 2MB}\n",
        ("max_memroy: unknown key (did you mean 'max_memory'?) in FOLDER/conf/experiment/mine.yaml; offstage "
         "--cfg job shows every key")),
    experiment("variables of one's own at the root", "lab: {disk: 1GB}\noffload_folder: ${lab.disk}\n",
        ("lab: unknown key in FOLDER/conf/experiment/mine.yaml; offstage --cfg job shows every key, and variables of "
         "your own stand below vars: {vars: {lab: …}}, used as ${vars.lab}")),
    typed("an option of another stage", "stages=score score.max_new_tokens=3",
        "score.max_new_tokens: unknown key; offstage --cfg job shows every key"),
    typed("a key of Hydra's misspelt", "hydra.mod=MULTIRUN",
        "hydra.mod: unknown key of Hydra's (did you mean 'mode'?); offstage --cfg hydra shows them"),
    typed("a key that a run goes by left out", "~max_memory",
        "max_memory: a run goes by this key; leave out ~max_memory, and it has its default"),
    typed("a key added that is there", "+seed=1",
        "+seed: the config has that key; seed=VALUE, without '+', changes it"),
    experiment("a size where devices belong", "max_memory: 2MB\n",
        ("max_memory: '2MB' in FOLDER/conf/experiment/mine.yaml names no device; give each its own size, as "
         "{cpu: 1GB} or {0: 12GB, cpu: 20GB}, or {} to have it worked out")),
    experiment("a list where devices belong", "max_memory: [2MB]\n",
        ("max_memory: ['2MB'] in FOLDER/conf/experiment/mine.yaml names no device; give each its own size, as "
         "{cpu: 1GB} or {0: 12GB, cpu: 20GB}, or {} to have it worked out")),
    experiment("a device with no size", "max_memory: {cpu: null}\n",
        "max_memory.cpu: null in FOLDER/conf/experiment/mine.yaml is no size; give one, or leave the key out"),
    experiment("devices by a wrong name", "max_memory: {gpu: 1GB, ram: 2GB}\n",
        ("max_memory.gpu: 'gpu' in FOLDER/conf/experiment/mine.yaml is no device; devices are cpu, disk and the "
         "numbers of accelerators, from 0 to 15"),
        ("max_memory.ram: 'ram' in FOLDER/conf/experiment/mine.yaml is no device; devices are cpu, disk and the "
         "numbers of accelerators, from 0 to 15")),
    typed("a unit that there isn't", "max_memory.cpu=12GBB",
        ("max_memory.cpu: '12GBB' is not a size; accepted: a whole number of bytes, or a number with B, kB, MB, "
         "GB, TB (powers of 10), KiB, MiB, GiB, TiB (of 2) or %")),
    typed("a negative size", "max_memory.cpu=-1GB",
        ("max_memory.cpu: '-1GB' is not a size; accepted: a whole number of bytes, or a number with B, kB, MB, "
         "GB, TB (powers of 10), KiB, MiB, GiB, TiB (of 2) or %")),
    typed("more than the whole", "max_memory.cpu=120%",
        ("max_memory.cpu: '120%' is more than the whole device; accepted: a whole number of bytes, or a number "
         "with B, kB, MB, GB, TB (powers of 10), KiB, MiB, GiB, TiB (of 2) or %")),
    typed("a rate without a unit", "hardware.rates.storage=fast",
        ("hardware.rates.storage: 'fast' is not a size; accepted: a whole number of bytes, or a number with B, "
         "kB, MB, GB, TB (powers of 10), KiB, MiB, GiB, TiB (of 2) or %")),
    typed("sizes to sweep over as a list", "-m max_memory.cpu=[1MB,2MB]",
        ("max_memory.cpu: ['1MB', '2MB'] is no size; give one, as max_memory.cpu=2MB, or to sweep over several "
         "-m max_memory.cpu=2MB,4MB")),
    typed("a group's file misspelt", "model=pretraind",
        ("model: 'pretraind' is no file of that group (did you mean 'pretrained'?); there are module, "
         "pretrained, tiny")),
    typed("a group that there isn't", "experiments=mine",
        "experiments: unknown key; offstage --cfg job shows every key"),
    typed("a tracker that there isn't", "tracker=wandb",
        "tracker: 'wandb' is no file of that group; there are mlflow, none, trackio"),
    WrongConfig("a file without its header", "--config-dir conf experiment=mine",
        (("experiment: FOLDER/conf/experiment/mine.yaml has no header, so that its keys (max_memory, seed) "
         "landed below 'experiment', where none is known; write '# @package _global_' as its first line"),),
        {"conf/experiment/mine.yaml": "max_memory: {cpu: 2MB}\nseed: 1\n"}),
    WrongConfig("a group's file with the group's name above its keys", "--config-dir conf hardware=mine",
        (("hardware.hardware: keys of a file of the group 'hardware' stand below 'hardware' already; in "
         "FOLDER/conf/hardware/mine.yaml write them without 'hardware:' above, or '# @package _global_' as its "
         "first line"),),
        {"conf/hardware/mine.yaml": "hardware:\n  host: {memory: 2GB}\n"}),
    WrongConfig("a file in the folder above its group", "--config-dir conf experiment=mine",
        (("experiment: 'mine' is no file of that group; there are least_budget, memory_sweep, policy_comparison, "
         "precision, repeated_sweep; own files are looked for as experiment/mine.yaml in FOLDER/conf, where "
         "mine.yaml lies: move it"),),
        {"conf/mine.yaml": "# @package _global_\nseed: 1\n"}),
    WrongConfig("a file with another ending", "--config-dir conf experiment=mine",
        (("experiment: 'mine' is no file of that group; there are least_budget, memory_sweep, policy_comparison, "
         "precision, repeated_sweep; own files are looked for as experiment/mine.yaml in FOLDER/conf, where "
         "experiment/mine.yml lies: move it"),),
        {"conf/experiment/mine.yml": "# @package _global_\nseed: 1\n"}),
    WrongConfig("a config of one's own that isn't made over the command's", "--config-dir conf --config-name mine",
        (("stages: the config has no such key, nor most others that a run goes by; one of your own begins with "
         "defaults: [config, _self_]"),),
        {"conf/mine.yaml": "seed: 1\n"}),
    experiment("a group chosen without its slash", "defaults:\n  - override model: pretrained\n",
        ("experiment/mine: 'override model' in its defaults means a group below its own; one of the root begins "
         "with a slash: - override /model: NAME")),
    experiment("a group chosen with neither slash nor override", "defaults:\n  - model: pretrained\n",
        ("experiment/mine: its defaults choose 'pretrained' of 'experiment/model', which there isn't; a group of the "
         "root begins with a slash: - override /model: pretrained")),
    experiment("a group chosen twice", "defaults:\n  - /model: pretrained\n",
        "model: its file is chosen twice; a choice that replaces another is - override /model: pretrained"),
    experiment("more defaults than Hydra reads in a second", "defaults:\n" + "  - /model: pretrained\n" * 1000,
        "'FOLDER/conf/experiment/mine.yaml': 1000 defaults; give 250 at most"),
    experiment("a path in the place of a group", "model: /ckpt/llama\n",
        ("model: '/ckpt/llama' in FOLDER/conf/experiment/mine.yaml is no mapping; write its keys below it, each "
         "as KEY: VALUE")),
    experiment("a list in the place of a group", "generate:\n  - max_new_tokens: 3\n",
        ("generate: [{'max_new_tokens': 3}] in FOLDER/conf/experiment/mine.yaml is no mapping; write its keys "
         "below it, each as KEY: VALUE")),
    typed("a folder of configs that there isn't", "--config-dir cnf experiment=mine",
        ("--config-dir: 'FOLDER/cnf' is not there; give the folder that has your experiment/, model/ or "
         "hardware/ in it")),
    experiment("a tab", "model:\n\tpath: /ckpt\n",
        ("FOLDER/conf/experiment/mine.yaml, line 3, column 1: found character '\\t' that cannot start any token; "
         "YAML is indented by spaces; write them in the place of the tab")),
    experiment("a key twice", "seed: 1\nseed: 2\n",
        ("FOLDER/conf/experiment/mine.yaml, line 3, column 1: found duplicate key seed; a key is given once; "
         "leave one of them out")),
    experiment("an indent that is none", "generate:\n  batch_size: 1\n max_new_tokens: 3\n",
        ("FOLDER/conf/experiment/mine.yaml, line 4, column 2: expected <block end>, but found '<block mapping "
         "start>'; the keys of one group begin in the same column; indent this line as those above it")),
    experiment("two keys in one line", "model: path: /ckpt\n",
        ("FOLDER/conf/experiment/mine.yaml, line 2, column 12: mapping values are not allowed here; one 'KEY: "
         "VALUE' a line, those of a group indented below it; quote a value that has ': ' in it")),
    experiment("an interpolation to nothing", "seed: ${sed}\n",
        "seed: ${sed} refers to a key that there isn't (did you mean 'seed'?); offstage --cfg job shows every key"),
    experiment("a variable that isn't set", "offload_folder: ${oc.env:SCRATCH_OF_NOBODY}/offload\n",
        ("offload_folder: the environment has no variable 'SCRATCH_OF_NOBODY'; set it, or give a value for "
         "where it isn't: ${oc.env:SCRATCH_OF_NOBODY,VALUE}")),
    experiment("an interpolation that isn't closed", "offload_folder: ${oc.env:HOME\n",
        "offload_folder: '${oc.env:HOME' is no interpolation; give ${KEY} or ${oc.env:NAME}, brace closed"),
    experiment("several faults", "seed: -2\ndtype: float8\nmax_memory: {cpu: -1}\nstrict: 'no'\n",
        ("dtype: 'float8' is none of auto, float32, float16, bfloat16 (did you mean 'float32'?); the default is "
         "'auto'"),
        "strict: 'no' is neither true nor false; the default is True",
        ("max_memory.cpu: '-1' is not a size; accepted: a whole number of bytes, or a number with B, kB, MB, "
         "GB, TB (powers of 10), KiB, MiB, GiB, TiB (of 2) or %"),
        "seed: -2 is no seed; give a whole number from 0 to 2**63 - 1"),
    typed("a negative number", "seed=-1",
        "seed: -1 is no seed; give a whole number from 0 to 2**63 - 1"),
    typed("a word for a number", "generate.max_new_tokens=many",
        "generate.max_new_tokens: 'many' is no number of tokens; give a whole number from 1"),
    typed("a dtype by another name", "dtype=fp16",
        ("dtype: 'fp16' is none of auto, float32, float16, bfloat16 (did you mean 'float16'?); the default is "
         "'auto'")),
    typed("no number of prompts", "generate.batch_size=1.5",
        ("generate.batch_size: 1.5 is neither a whole number from 1, auto nor null; the default is None")),
    typed("a policy misspelt", "device_map=optimall",
        ("device_map: 'optimall' is no policy (did you mean 'optimal'?); give one of auto, balanced, "
         "balanced_low_0, optimal, sequential, {cpu_offload_gb: N}, a map of module names to devices, the path "
         "of a device_map.json, or one device")),
    typed("a device as a policy", "device_map=gpu",
        ("device_map: 'gpu' is no policy; give one of auto, balanced, balanced_low_0, optimal, sequential, "
         "{cpu_offload_gb: N}, a map of module names to devices, the path of a device_map.json, or one device")),
    typed("a map of a module that there isn't", '"device_map={model.layer: cpu, model: cpu, lm_head: cpu}"',
        "device_map: 'model.layer' names nothing in the model (did you mean 'model.layers'?)"),
    typed("a map that doesn't name all", '"device_map={model.layers: cpu, model.embed_tokens: cpu}"',
        ("device_map: no entry covers 'model.norm.weight' and 2 more; add 'model.norm', 'model.rotary_emb', or "
         "'' in a config file for all that the map doesn't name")),
    typed("a stage to stop after that isn't run", "stop_after=load",
        ("stop_after: 'load' is not among the stages empty_init, plan, shard_load, dispatch, generate (did you "
         "mean 'shard_load'?)")),
    typed("no rate", "stages=finetune finetune.learning_rate=-1 finetune.text_file=data.txt",
        "finetune.learning_rate: -1 is no rate; give a finite number above 0",
        "finetune.text_file: 'FOLDER/data.txt' is no file; give one of text in UTF-8"),
    typed("devices of a machine as a mapping", '"hardware.devices={memory: 24GB}"',
        "hardware.devices: {'memory': '24GB'} is no list; give null, or one {memory: SIZE} for each accelerator"),
    typed("a choice that there isn't", "storage.io=fast",
        "storage.io: 'fast' is none of auto, direct, mmap (did you mean 'auto'?); the default is 'auto'"),
    typed("a checkpoint that there isn't", "model.path=./llama",
        "model.path: 'FOLDER/llama' is no folder; give a checkpoint folder or a .gguf file", code=3),
    WrongConfig("a file in the place of a folder", "model.path=notes.txt",
        ("model.path: 'FOLDER/notes.txt' is no folder; give a checkpoint folder or a .gguf file",),
        {"notes.txt": "notes\n"}, code=3),
    typed("prompts that there aren't", "generate.prompts_file=prompts.txt",
        ("generate.prompts_file: 'FOLDER/prompts.txt' is no file; give a text file with one prompt a line, a "
         ".jsonl one, or - for standard input")),
    WrongConfig("a file in the place of the configs' folder", "--config-dir mine.yaml experiment=mine",
        (("--config-dir: 'FOLDER/mine.yaml' is a file; give the folder that has your experiment/, model/ or "
         "hardware/ in it"),),
        {"mine.yaml": "# @package _global_\nseed: 1\n"}),
    WrongConfig("overrides on both sides of an option", "seed=1 --config-dir conf stop_after=dispach",
        (("stop_after: 'dispach' is not among the stages empty_init, plan, shard_load, dispatch, generate (did "
         "you mean 'dispatch'?)"),),
        {"conf/x.yaml": ""}),
    typed("a key with dashes", "--seed=1",
        ("--seed=1: no such option; a key of the config has no dashes: seed=1; offstage --hydra-help shows the "
         "options")),
    typed("a word alone", "memory_sweep",
        "'memory_sweep' is no KEY=VALUE; a key is set by memory_sweep=VALUE, and options begin with --"),
    typed("spaces around the sign", '"seed = 1"',
        "'seed = 1': no spaces belong around '='; write seed=1"),
    typed("a bracket that isn't closed", '"max_memory={cpu: 2MB"',
        ("max_memory: '{cpu: 2MB' can't be read; brackets and quotes are closed, a mapping is {KEY: VALUE}, a "
         "list [A,B], and text with other signs stands in quotes, which a shell needs quoted again")),
    typed("several values without -m", "max_memory.cpu=2MB,4MB",
        ("max_memory.cpu: '2MB,4MB' is several values; one job each is offstage -m max_memory.cpu=2MB,4MB, a "
         "list max_memory.cpu=[2MB,4MB], a text with commas \"max_memory.cpu='2MB,4MB'\"")),
    typed("a sweep with an empty value", "-m seed=1,,2",
        "seed: '1,,2' has an empty value between its commas; leave it out, or write null or '' for one"),
    typed("a sweep over nothing", '-m "seed=range(5,1)"',
        "seed: 'range(5,1)' has no value, so the sweep would have no job; give at least one"),
    typed("a launcher that isn't installed", "-m hydra/launcher=joblib seed=1,2",
        ("hydra/launcher: 'joblib' is no file of that group; there are basic, local, submitit_local, "
         "submitit_slurm")),
)  # fmt: skip
"""The table."""

UNKNOWN_IN_HARDWARE = (
    typed("a misspelt key of a device", "'hardware.devices=[{memory: 24GB, nam: a}]'", "hardware.devices"),
    typed("a misspelt key of the hardware", "+hardware.hosst.memory=64GB", "hardware.hosst"),
)
"""Keys that passed silently, each with what its line begins with."""


def main() -> None:
    """Print what is given, and the lines that it gets."""
    for case in (*WRONG_CONFIGS, *UNKNOWN_IN_HARDWARE):
        print(f"{case.name}\n    $ offstage {case.command}")
        for path, text in case.files.items():
            print(f"    {path}:", *text.splitlines(), sep="\n        ")
        print(*(f"    offstage: {line}" for line in case.lines), sep="\n", end="\n\n")


if __name__ == "__main__":
    main()
