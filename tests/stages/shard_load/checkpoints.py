"""Checkpoints made on the spot, safetensors files written byte by byte, and a context without a runner."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from offstage.pipeline.errors import raise_faults
from offstage.pipeline.stage import Artifact, FileEntry
from offstage.stages.checkpoints.packed import AtRest
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.init import init_empty_weights
from offstage.stages.empty_init.skeleton import Skeleton, TensorSpec
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.serving import Line
from offstage.stages.shard_load.expert_rows import Rows
from offstage.stages.shard_load.sources import DiskWeights, TensorSource, Way
from offstage.stages.shard_load.stage import ShardLoadStage
from offstage.stages.units import DeviceId
from tests.stages.plan.plans import plan_by_hand, with_lines

SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SMALL, intermediate_size=48, num_key_value_heads=2),
    "opt": transformers.OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64),
    "bloom": transformers.BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4),
    "gpt2": transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt_neox": transformers.GPTNeoXConfig(**SMALL, intermediate_size=48, max_position_embeddings=64),
    "qwen2": transformers.Qwen2Config(**SMALL, intermediate_size=48, num_key_value_heads=2),
    "mixtral": transformers.MixtralConfig(
        **SMALL, intermediate_size=48, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    ),
}


def make_model(kind: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """Return a small model with random weights, its norms and biases random too."""
    torch.manual_seed(0)
    config = deepcopy(CONFIGS[kind])  # making a model writes its dtype into its config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).eval()


def save_safetensors(model: Any, folder: Path, *, sharded: bool = False) -> Path:
    model.save_pretrained(folder, max_shard_size="40KB" if sharded else "5GB")
    return folder


def save_bin(model: Any, folder: Path, *, sharded: bool = False, old: bool = False) -> Path:
    """Write the tensors that ``save_pretrained`` would write as ``.bin``, tied ones under both names."""
    save_safetensors(model, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = [names[0::2], names[1::2]] if sharded else [names]
    files = [f"pytorch_model-{i + 1:05}-of-00002.bin" for i in range(2)] if sharded else ["pytorch_model.bin"]
    for part, file in zip(parts, files, strict=True):
        data = {name: tensors[name].clone() for name in part}
        torch.save(data, folder / file, _use_new_zipfile_serialization=not old)
    if sharded:
        weight_map = {name: file for part, file in zip(parts, files, strict=True) for name in part}
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        folder.joinpath("pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def empty_model(kind: str, dtype: torch.dtype) -> Any:
    with init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(deepcopy(CONFIGS[kind]), dtype=dtype)
    model.tie_weights()
    return model.eval()


def make_plan(skeleton: Skeleton, where: Callable[[str], DeviceId]) -> Plan:
    """Return a plan whose homes are ``where(name of the tensor's leader)``."""
    homes: dict[str, DeviceId] = {t.name: where(skeleton.leader(t.name)) for t in skeleton.tensors}
    return plan_by_hand(homes, main=0 if 0 in homes.values() else "cpu")


@dataclass
class FakeContext:
    """What the runner lends to a stage, as far as shard_load asks for it."""

    config: dict[str, Any]
    cache: Path
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    model: Any = None

    def artifact(self, stage: str) -> Artifact:
        return self.artifacts[stage]

    def live(self, stage: str) -> Any:
        assert stage == "empty_init"
        return self.model()

    def host_peak(self) -> int:
        return 0


def artifact_of(stage: str, folder: Path) -> Artifact:
    files = {f.name: FileEntry(f.stat().st_size, hashlib.sha256(f.read_bytes()).hexdigest()) for f in folder.iterdir()}
    return Artifact(stage, "key", folder, files)


def make_context(
    root: Path,
    checkpoint: Path,
    make: Callable[[], Any],
    where: Callable[[str], DeviceId],
    *,
    routes: bool = False,
    packs: bool = False,
    waits_packed: bool = False,
    **config: Any,
) -> FakeContext:
    """Return a context for loading ``checkpoint`` into what ``make()`` returns, each tensor at ``where(name)``.

    With ``routes`` the experts of a mixture that lie on disk are brought one by one; with ``packs`` all that is on disk
    rests packed, and with ``waits_packed`` all that is on the host waits there so.
    """
    skeleton = describe(make(), rehearsed=False)
    plan = make_plan(skeleton, where)
    experts = [name for spec in skeleton.experts for name in spec.tensors if plan.homes[name] == "disk"]
    ways = {**({"disk": "direct"} if packs else {}), **({"cpu": "packed"} if waits_packed else {})}
    serving: dict[str, Any] = {name: ways[home] for name, home in plan.homes.items() if home in ways}
    serving |= dict.fromkeys(experts, "experts") if routes else {}
    packed = waits_packed and "zstd"

    def lying(line: Line) -> Line:
        return line._replace(serving=serving.get(line.name), codec=packed or None if line.home == "cpu" else None)

    plan = replace(with_lines(plan, lying), codec="zstd" if packs else None)
    folders = {stage: root / "artifacts" / stage for stage in ("empty_init", "plan")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    skeleton.save(folders["empty_init"])
    plan.save(folders["plan"])
    full = {
        "model": {"path": str(checkpoint)},
        "dtype": "auto",
        "offload_folder": None,
        "offload_state_dict": False,
        **config,
    }
    artifacts = {stage: artifact_of(stage, folder) for stage, folder in folders.items()}
    return FakeContext(full, root / "cache", artifacts, make)


def disk_weights(extents: Mapping[str, AtRest], rows: Mapping[str, Rows] | None = None) -> DiskWeights:
    """Return the tensors that lie at ``extents`` as a model's that wait there, and those of experts at ``rows``."""
    by_row = rows or {}
    sources = {}
    for name in dict.fromkeys((*extents, *by_row)):
        at = (extents[name],) if name in extents else tuple(piece for row in by_row[name] for piece in row)
        spec = TensorSpec(name, at[0].shape, at[0].dtype)
        way: Way = "in_place" if name in extents else "by_expert"
        sources[name] = TensorSource(spec, name, "disk", way, at, by_row.get(name, ()))
    return DiskWeights(sources)


def state_of(placed: Any) -> dict[str, torch.Tensor]:
    """Return every tensor of a placed model's state dict, those on disk read."""
    state = placed.model.state_dict()
    return {name: placed.offloaded.get(name, value) for name, value in state.items()}


def assert_same(tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensors[name].dtype == tensor.dtype, name
        assert torch.equal(tensors[name].cpu(), tensor), name


def raw_safetensors(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a safetensors file of ``header`` (bytes, or a value to write as JSON) and ``data``."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def load(context: FakeContext, out: Path) -> Any:
    """Run the stage as the runner does: check, gather, build, revive."""
    stage = ShardLoadStage()
    raise_faults(list(stage.check(context.config)))
    inputs = stage.gather(context)
    out.mkdir(exist_ok=True)
    stage.build(inputs, context, out)
    context.artifacts["shard_load"] = artifact_of("shard_load", out)
    return stage.revive(inputs, context)


def revive(context: FakeContext) -> Any:
    """Return the live half of the stage, in a run whose artifact is there already."""
    stage = ShardLoadStage()
    return stage.revive(stage.gather(context), context)
