"""What stands beside the weights, or is given on the command line: configs, tokenizers, device maps, prompts."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import transformers
from transformers import AutoModelForCausalLM

from offstage.pipeline.cache.store import Store
from offstage.pipeline.errors import ConfigError, foreign, raise_faults
from offstage.pipeline.stage import Context
from offstage.stages.checkpoints.generation_defaults import GENERATION_CONFIG
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.tokenizers import load_tokenizer
from offstage.stages.empty_init.stage import EmptyInitStage
from offstage.stages.generate import options
from offstage.stages.generate.prompts import Encoder
from offstage.stages.inputs.generate_options import read_generate
from offstage.stages.inputs.prompts import Prompt, check_prompts, read_prompts
from offstage.stages.plan import options as plan_options
from offstage.stages.plan.options import PlanConfig
from offstage.stages.plan.plan import OFFLOAD
from offstage.stages.units import parse_device
from tests.fuzz.formats import RIGHT, Format, require
from tests.fuzz.line_mutations import LINES
from tests.fuzz.mutations import JSON

TINY = Path(str(resources.files("offstage.conf"))) / "checkpoints" / "tiny"
_SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 16, "intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_SMALL, "num_key_value_heads": 1},
    "gpt2": {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 16, "n_positions": 32},
    "opt": {**_SMALL, "ffn_dim": 16, "word_embed_proj_dim": 8, "max_position_embeddings": 32},
    "mixtral": {**_SMALL, "num_key_value_heads": 1, "num_local_experts": 2},
    "gemma2": {**_SMALL, "num_key_value_heads": 1, "head_dim": 4},
    "mamba": {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 16, "state_size": 4},
    "t5": {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 16},
    "falcon": {**_SMALL},
}
"""One small config of each kind of model that there is."""
TEXT = "The weights wait offstage, 24 é"


def _node(folder: Path) -> dict[str, Any]:
    named = {"class": None, "tokenizer": None, "no_split": None, "revision": None}
    return {"kind": "pretrained", "path": str(folder), "trust_remote_code": False, "allow_links": False, **named}


def _make_configs(folder: Path) -> None:
    for family, sizes in FAMILIES.items():
        config = transformers.AutoConfig.for_model(family, **sizes)
        config.architectures = [AutoModelForCausalLM._model_mapping.get(type(config), _seq2seq(config)).__name__]
        config.save_pretrained(folder / family)
    folder.joinpath("embedded").mkdir()
    shutil.copy(TINY / "config.json", folder / "embedded")


def _seq2seq(config: Any) -> Any:
    return transformers.AutoModelForSeq2SeqLM._model_mapping.get(type(config), None)


def _changed_folder(folder: Path, pristine: Path, name: str) -> Path:
    """Return the folder in ``folder`` whose file ``name`` isn't that of ``pristine``; any where none was changed."""
    folders = sorted(path.parent for path in folder.glob(f"*/{name}"))
    return next((p for p in folders if (p / name).read_bytes() != (pristine / p.name / name).read_bytes()), folders[0])


def _attempt_config(folder: Path, pristine: Path) -> str:
    """Build the skeleton as a run does: its stage alone, without weights."""
    place = _changed_folder(folder, pristine, "config.json")
    stage, config = EmptyInitStage(), {"model": _node(place), "dtype": "auto"}
    context = cast("Context", SimpleNamespace(config=config))
    raise_faults(list(stage.check(config)))
    inputs = stage.gather(context)
    artifact, model, _ = Store(folder / "cache").obtain(
        "empty_init", "key", lambda built: stage.build(inputs, context, built)
    )
    require(isinstance(model, torch.nn.Module), f"built {model!r}")
    stage.report(artifact)
    return RIGHT


def _make_tokenizers(folder: Path) -> None:
    for name, normalizer in (("plain", None), ("steps", {"type": "Sequence", "normalizers": [{"type": "NFKC"}]})):
        folder.joinpath(name).mkdir()
        content = json.loads((TINY / "tokenizer.json").read_text())
        content["normalizer"] = normalizer or content["normalizer"]
        folder.joinpath(name, "tokenizer.json").write_text(json.dumps(content))
        shutil.copy(TINY / "tokenizer_config.json", folder / name)
        shutil.copy(TINY / "config.json", folder / name)
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False, "special": True}}
    folder.joinpath("steps", "special_tokens_map.json").write_text(json.dumps(special))
    folder.joinpath("steps", "added_tokens.json").write_text(json.dumps({"<new>": 1024}))
    folder.joinpath("steps", "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


def _attempt_tokenizer(folder: Path, pristine: Path) -> str:
    """Make tokens of a text and a text of these."""
    changed = [
        p
        for p in folder.rglob("*")
        if p.is_file() and p.read_bytes() != (pristine / p.relative_to(folder)).read_bytes()
    ]
    place = changed[0].parent if changed else folder / "plain"
    tokenizer = load_tokenizer(ModelSource.of(_node(place)))
    ids = Encoder(tokenizer, chat=False).encode("text", Prompt(TEXT))
    require(all(isinstance(token, int) for token in ids), f"tokens {ids!r}")
    with foreign(ConfigError, "the tokenizer can't make text"):
        tokenizer.decode([token for token in ids if 0 <= token < 1024], skip_special_tokens=True)
    require(bool(ids), "no tokens")
    return RIGHT


def _make_generation(folder: Path) -> None:
    shutil.copy(TINY / "config.json", folder)
    shutil.copy(TINY / "tokenizer.json", folder)
    sampling = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 50,
        "top_p": 0.9,
        "eos_token_id": [1, 2],
        "num_beams": 1,
    }
    limits = {"max_length": 20, "repetition_penalty": 1.1, "bad_words_ids": [[5, 6]], "suppress_tokens": [7]}
    content = {"bos_token_id": 0, "pad_token_id": 2, **sampling, **limits, "transformers_version": "5.0.0"}
    folder.joinpath(GENERATION_CONFIG).write_text(json.dumps(content, indent=1))


def _attempt_generation(folder: Path, _pristine: Path) -> str:
    asked = {"prompts": ["a"], "prompts_file": None, "batch_size": None, "max_new_tokens": 3, "do_sample": False}
    given = read_generate(asked)
    raise_faults(list(options.check_options(given)))
    raise_faults(list(options.check_served(given, _node(folder))))
    return RIGHT


def _make_maps(folder: Path) -> None:
    layers = {f"model.layers.{number}": "cpu" if number % 2 else "disk" for number in range(8)}
    whole = {"model.embed_tokens": 0, **layers, "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    folder.joinpath("device_map.json").write_text(json.dumps(whole, indent=1))
    folder.joinpath("amount.json").write_text(json.dumps({OFFLOAD: 1.5}))
    folder.joinpath("model.json").write_text(json.dumps({"": "cpu"}))


def _attempt_map(folder: Path, pristine: Path) -> str:
    """Read each map; one that is taken says for every module one device, as the file does."""
    for path in sorted(folder.glob("*.json")):
        raise_faults(list(plan_options.faults(PlanConfig(device_map=str(path)))))
        choice = plan_options.read_choice(str(path))
        device_map = json.loads(path.read_bytes())
        for name, device in choice.entries.items():
            require(parse_device(device_map[name]) == device, f"{name!r}: {device!r} of {device_map[name]!r}")
    return RIGHT


def _make_prompts(folder: Path) -> None:
    folder.joinpath("prompts.txt").write_text("The weights wait\n\noffstage é\nuntil their cue\n", encoding="utf-8")
    lines = [{"prompt": "The weights", "max_new_tokens": 3}, {"token_ids": [5, 6, 7], "seed": 4}, "wait", [8, 9]]
    folder.joinpath("prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _attempt_prompts(folder: Path, _pristine: Path) -> str:
    encoder = Encoder(load_tokenizer(ModelSource.of(_node(TINY))))
    for path in (folder / "prompts.txt", folder / "prompts.jsonl"):
        asked = read_generate({"prompts": None, "prompts_file": str(path), "batch_size": None})
        raise_faults(list(check_prompts(asked)))
        read = read_prompts(asked)
        require(all(prompt.token_ids or prompt.text for prompt in read.values()), f"{read!r}")
        raise_faults(list(options.check_own_options(read, asked, _node(TINY))))
        for name, prompt in read.items():
            encoder.encode(name, prompt)
    return RIGHT


FORMATS = (
    Format("config", _make_configs, ("*/config.json",), JSON, _attempt_config),
    Format("tokenizer", _make_tokenizers, ("*/*token*.json", "*/*.jinja"), JSON, _attempt_tokenizer),
    Format("generation config", _make_generation, (GENERATION_CONFIG,), JSON, _attempt_generation),
    Format("device map", _make_maps, ("*.json",), JSON, _attempt_map),
    Format("prompts", _make_prompts, ("prompts.txt", "prompts.jsonl"), LINES, _attempt_prompts),
)
