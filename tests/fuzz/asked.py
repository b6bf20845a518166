"""What a run is asked, and what it is asked with: the config's keys, images, recordings, adapters, kept results."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import wave
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import hydra
import numpy as np
from hydra.core.global_hydra import GlobalHydra
from safetensors.numpy import save

from offstage.pipeline.atomic_files import mendable
from offstage.pipeline.cache.store import Store
from offstage.pipeline.config import register, resolve
from offstage.pipeline.errors import raise_faults
from offstage.pipeline.hydra_composing import noted_files
from offstage.pipeline.hydra_messages import composing
from offstage.pipeline.runner import check_config
from offstage.pipeline.stage import Context
from offstage.stages.checkpoints.adapters import open_adapter, read_settings
from offstage.stages.empty_init.stage import EmptyInitStage
from offstage.stages.inference.progress import Progress
from offstage.stages.inputs.audio import read_audio
from offstage.stages.inputs.images import check_image, read_image
from tests.fuzz.commands import CHECKPOINT, judge, measure_once, run_command
from tests.fuzz.formats import ALONE, RIGHT, Format, require
from tests.fuzz.line_mutations import LINES
from tests.fuzz.mutations import BYTES, JSON, Mutations
from tests.fuzz.texts import TINY

RATE = 16000
_SHARED: dict[str, Any] = {
    "defaults": ["config", "_self_"],
    "dtype": "auto",
    "seed": 3,
    "device_map": "optimal",
    "max_memory": {"0": "12GB", "cpu": "80%"},
    "storage": {"io": "direct", "codec": "none"},
    "measure": {"repeats": 1, "warmup": 0, "fresh": False},
    "verify": "headers",
}
_ASKED: dict[str, dict[str, Any]] = {
    "generate": {
        "stages": ["empty_init", "plan", "shard_load", "dispatch", "generate"],
        "stop_after": "generate",
        "generate": {
            "prompts": ["The weights", [5, 6, 7], {"prompt": "wait", "max_new_tokens": 2, "seed": 4}],
            "max_new_tokens": 3, "min_new_tokens": 0, "batch_size": 2, "lockstep": 1, "chat": "auto", "system": None,
            "do_sample": True, "top_k": 5, "stop_strings": ["a"], "bad_words_ids": [[1, 2]],
        },
        "objective": {"metric": "memory.predicted.cpu", "at_most": {"decode_seconds_per_token": 3}, "at_least": {}},
        "tracker": {"kind": None, "folder": "runs", "experiment": "x", "notes": None},
    },
    "plan": {
        "stop_after": "plan",
        "hardware": {
            "devices": [{"memory": "24GB", "ledger": "20GB"}, {"memory": 10**9}],
            "host": {"memory": "64GB"},
            "rates": {"storage": "3GB", "host_to_device": "25GB", "root": None},
        },
        "device_map": {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "lm_head": 0},
        "device_map_overrides": {"model.layers.0": "cpu"},
        "model": {"kind": "pretrained", "path": str(TINY), "class": None, "no_split": ["LlamaDecoderLayer"]},
    },
    "score": {
        "stages": ["empty_init", "plan", "shard_load", "dispatch", "score"],
        "score": {"texts": ["The weights wait", {"text": "offstage"}], "window": 8, "stride": 4, "batch_size": 2},
    },
    "forward": {
        "stages": ["empty_init", "plan", "shard_load", "dispatch", "forward"],
        "forward": {"texts": ["The weights", "wait"], "batch_size": 2, "pooling": "mean", "normalize": True},
    },
    "finetune": {
        "stages": ["empty_init", "plan", "shard_load", "dispatch", "finetune"],
        "finetune": {
            "text_file": str(TINY / "tokenizer.json"), "steps": 2, "batch_size": 1, "learning_rate": 1e-4,
            "lora": {"r": 4, "target_modules": ["q_proj"]}, "activation_offload": {"ratio": 0.5, "target": "disk"},
        },
    },
}  # fmt: skip


def _make_keys(folder: Path) -> None:
    for name, own in _ASKED.items():
        folder.joinpath(f"{name}.yaml").write_text(json.dumps({**_SHARED, **own}, indent=1))


def _changed(folder: Path, pristine: Path) -> Path:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return next((path for path in files if path.read_bytes() != (pristine / path.name).read_bytes()), files[0])


def _attempt_keys(folder: Path, pristine: Path) -> str:
    """Compose the config and check it, as a run does before any work."""
    os.chdir(folder)
    name = _changed(folder, pristine).stem

    with mendable(), composing():
        register()
        GlobalHydra.instance().clear()
        with hydra.initialize_config_dir(str(folder), version_base="1.3"), noted_files({}):
            check_config(resolve(hydra.compose(name, ["hydra.searchpath=[pkg://offstage.conf]"])))
    return RIGHT


def _make_key_commands(folder: Path) -> None:
    folder.joinpath("keys").mkdir()
    _make_keys(folder / "keys")
    folder.joinpath("ckpt").symlink_to(TINY)
    measure_once(folder, CHECKPOINT)
    folder.joinpath("ckpt").unlink()
    folder.joinpath("tokens.json").unlink()


def _attempt_key_command(folder: Path, pristine: Path) -> str:
    keys = folder / "keys"
    asked = ("--config-dir", str(keys), "--config-name", _changed(keys, pristine / "keys").stem)
    judge(*run_command(asked, folder), folder)
    return ALONE


def _make_recordings(folder: Path) -> None:
    for width, channels in ((1, 1), (2, 1), (2, 2), (3, 1), (4, 3)):
        with wave.open(str(folder / f"{width}-{channels}.wav"), "wb") as file:
            file.setparams((channels, width, RATE, 0, "NONE", ""))
            file.writeframes(bytes(range(96)) * channels)


def in_header(content: bytes, _donor: bytes, chance: Random) -> bytes:
    """Change one to three bytes among the first, where a format says what the others are."""
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 3)) if changed else 0):
        changed[chance.randrange(min(48, len(changed)))] = chance.choice((0, 1, 2, 3, 16, 127, 128, 254, 255))
    return bytes(changed)


MEDIA: Mutations = (*[in_header] * 6, *BYTES)


def _attempt_recording(folder: Path, pristine: Path) -> str:
    samples = read_audio("forward.audio[0]", _changed(folder, pristine), rate=RATE)
    require(samples.dtype == np.float32 and samples.ndim == 1, f"{samples.dtype} {samples.shape}")
    return ALONE


def _make_images(folder: Path) -> None:
    from PIL import Image

    image = Image.fromarray(np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3))
    for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"):
        buffer = io.BytesIO()
        image.save(buffer, format=kind)
        folder.joinpath(f"image.{kind.lower()}").write_bytes(buffer.getvalue())


def _attempt_image(folder: Path, pristine: Path) -> str:
    file = _changed(folder, pristine)
    check_image("forward.images[0]", file)
    require(read_image("forward.images[0]", file).mode == "RGB", "another mode")
    return ALONE


def _make_adapter(folder: Path) -> None:
    settings = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none", "task_type": "CAUSAL_LM",
        "target_modules": ["q_proj", "down_proj"], "rank_pattern": {"layers.1.*q_proj": 2}, "alpha_pattern": {},
        "modules_to_save": None, "layers_to_transform": None, "layers_pattern": None, "exclude_modules": None,
        "use_dora": False, "use_rslora": False, "init_lora_weights": True, "base_model_name_or_path": "tiny",
    }  # fmt: skip
    folder.joinpath("adapter_config.json").write_text(json.dumps(settings))
    layer = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    tensors = {f"{layer}A.weight": np.ones((4, 8), np.float32), f"{layer}B.weight": np.ones((8, 4), np.float32)}
    folder.joinpath("adapter_model.safetensors").write_bytes(save(tensors))


def _attempt_adapter(folder: Path, _pristine: Path) -> str:
    """Read what it says, and have peft put it into a model where peft is installed."""
    node = {"kind": "pretrained", "path": str(TINY), "trust_remote_code": False, "allow_links": False}
    config = {"model": {**node, "class": None, "adapter": str(folder)}, "dtype": "auto"}
    stage = EmptyInitStage()
    if importlib.util.find_spec("peft") is None:
        require(bool(read_settings(folder)), "no settings")
        require(bool(open_adapter(folder).files), "no files")
        return ALONE
    raise_faults(list(stage.check(config)))
    context = cast("Context", SimpleNamespace(config=config))
    inputs = stage.gather(context)
    Store(folder / "cache").obtain("empty_init", "key", lambda built: stage.build(inputs, context, built))
    open_adapter(folder)
    return ALONE


def _make_results(folder: Path) -> None:
    progress = Progress(folder / "generations.jsonl")
    for batch in range(3):
        rows = [
            {"index": 2 * batch + each, "batch": batch, "rows": 2, "text": "ä", "token_ids": [5, 6]} for each in (0, 1)
        ]
        progress.add(rows)


def _attempt_results(folder: Path, pristine: Path) -> str:
    """Take what is there: whole batches alone, and the same when they are read again."""
    whole = Progress(pristine / "generations.jsonl").done
    progress = Progress(folder / "generations.jsonl")
    require(all(len(rows) == rows[0]["rows"] for rows in progress.done.values()), "half a batch")
    require(Progress(folder / "generations.jsonl").done == progress.done, "another the second time")
    rows = progress.settle()
    same = all(row in [each for kept in whole.values() for each in kept] for row in rows)
    return RIGHT if same else ALONE


FORMATS = (
    Format("config keys", _make_keys, ("*.yaml",), JSON, _attempt_keys),
    Format("recording", _make_recordings, ("*.wav",), MEDIA, _attempt_recording),
    Format("image", _make_images, ("image.*",), MEDIA, _attempt_image),
    Format("adapter", _make_adapter, ("adapter_config.json",), JSON, _attempt_adapter),
    Format("kept results", _make_results, ("generations.jsonl",), LINES, _attempt_results),
    Format("run: config keys", _make_key_commands, ("keys/*.yaml",), JSON, _attempt_key_command, apart=True),
)
