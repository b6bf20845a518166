"""Whole loads, held against transformers' own."""

import zlib
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from offstage.pipeline.errors import CheckpointError
from offstage.stages.empty_init.init import init_empty_weights
from tests.long_form import in_part, in_turn
from tests.stages.shard_load.checkpoints import (
    CONFIGS,
    artifact_of,
    assert_same,
    empty_model,
    load,
    make_context,
    make_model,
    save_bin,
    save_safetensors,
    state_of,
)

HOMES = {
    "host": lambda name: "cpu",
    "disk": lambda name: "disk",
    "both": lambda name: "disk" if zlib.crc32(name.encode()) % 2 else "cpu",
}
SAVERS = {
    "safetensors": lambda model, folder: save_safetensors(model, folder),
    "sharded safetensors": lambda model, folder: save_safetensors(model, folder, sharded=True),
    "bin": lambda model, folder: save_bin(model, folder),
    "sharded bin": lambda model, folder: save_bin(model, folder, sharded=True),
    "sharded bin of old": lambda model, folder: save_bin(model, folder, sharded=True, old=True),
}
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


def plain_load(folder: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def check_like_plain_load(root: Path, folder: Path, *, kind: str, dtype: torch.dtype, homes: str) -> None:
    context = make_context(root, folder, lambda: empty_model(kind, dtype), HOMES[homes])
    placed = load(context, root / "out")
    plain = plain_load(folder, dtype)
    assert_same(state_of(placed), plain.state_dict())
    assert_same(dict(placed.model.named_buffers()), dict(plain.named_buffers()))


DTYPES = {"as saved": (FLOAT32, FLOAT32), "bfloat16": (BFLOAT16, BFLOAT16), "cast": (FLOAT32, FLOAT16)}


@pytest.mark.parametrize(("kind", "saver", "dtypes"), in_turn(CONFIGS, SAVERS, DTYPES))
def test_every_format_loads_to_what_a_plain_load_gives(tmp_path: Path, kind: str, saver: str, dtypes: str) -> None:
    saved, dtype = DTYPES[dtypes]
    folder = SAVERS[saver](make_model(kind, saved), tmp_path / "checkpoint")
    check_like_plain_load(tmp_path, folder, kind=kind, dtype=dtype, homes="both")


@pytest.mark.parametrize("homes", ["host", "disk"])
@pytest.mark.parametrize("saver", ["sharded safetensors", "bin"])
@pytest.mark.parametrize("kind", in_part(CONFIGS))
def test_every_model_loads_to_one_tier(tmp_path: Path, kind: str, saver: str, homes: str) -> None:
    folder = SAVERS[saver](make_model(kind, BFLOAT16), tmp_path / "checkpoint")
    check_like_plain_load(tmp_path, folder, kind=kind, dtype=BFLOAT16, homes=homes)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox"])
def test_what_the_checkpoint_holds_as_needed_is_not_copied(tmp_path: Path, kind: str) -> None:
    folder = save_safetensors(make_model(kind, BFLOAT16), tmp_path / "checkpoint", sharded=True)
    context = make_context(tmp_path, folder, lambda: empty_model(kind, BFLOAT16), HOMES["disk"])
    placed = load(context, tmp_path / "out")
    assert not (tmp_path / "cache").exists()
    assert placed.read_bytes == 0
    report = artifact_of("shard_load", tmp_path / "out").json("load_report.json")
    assert report["stored"] == {"tensors": 0, "bytes": 0}
    assert report["served"]["bytes"] == report["tiers"]["disk"]["bytes"] > 0


def test_a_base_model_loads_from_the_checkpoint_of_one_with_a_head_and_the_other_way_round(tmp_path: Path) -> None:
    whole = make_model("gpt2")
    base = whole.transformer
    for name, source, target in (("strip", whole, base), ("add", base, whole)):
        folder = save_safetensors(source, tmp_path / name, sharded=True)

        def make(target: nn.Module = target) -> nn.Module:
            return type(target)(target.config).to("meta").eval()

        if name == "strip":
            context = make_context(tmp_path / f"c{name}", folder, make, HOMES["host"])
            # The head is tied, so all that the base model doesn't take up is nothing.
            assert_same(load(context, tmp_path / f"out{name}").model.state_dict(), base.state_dict())
        else:
            context = make_context(tmp_path / f"c{name}", folder, lambda: empty_model("gpt2", FLOAT32), HOMES["disk"])
            assert_same(state_of(load(context, tmp_path / f"out{name}")), whole.state_dict())


def test_tied_names_share_one_parameter_and_one_read(tmp_path: Path) -> None:
    folder = save_safetensors(make_model("opt"), tmp_path / "checkpoint")
    context = make_context(tmp_path, folder, lambda: empty_model("opt", FLOAT32), HOMES["host"])
    placed = load(context, tmp_path / "out")
    assert placed.model.lm_head.weight is placed.model.model.decoder.embed_tokens.weight
    assert placed.read_bytes == sum(p.nbytes for p in placed.model.parameters())


def test_on_disk_every_tied_name_is_there(tmp_path: Path) -> None:
    folder = save_safetensors(make_model("opt"), tmp_path / "checkpoint")
    context = make_context(tmp_path, folder, lambda: empty_model("opt", FLOAT32), HOMES["disk"])
    placed = load(context, tmp_path / "out")
    assert placed.model.lm_head.weight.is_meta
    assert torch.equal(placed.offloaded["lm_head.weight"], placed.offloaded["model.decoder.embed_tokens.weight"])


def test_tied_names_that_differ_in_the_checkpoint_are_refused(tmp_path: Path) -> None:
    folder = save_safetensors(make_model("opt"), tmp_path / "checkpoint")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.zeros(96, 32)}, folder / "model.safetensors", {"format": "pt"})
    context = make_context(tmp_path, folder, lambda: empty_model("opt", FLOAT32), HOMES["host"])
    with pytest.raises(CheckpointError, match="are tied in the model and differ in the checkpoint"):
        load(context, tmp_path / "out")


class Custom(nn.Module):
    """A module that is not transformers': a persistent buffer of integers, one that isn't persistent, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def make_custom() -> nn.Module:
    with init_empty_weights():
        return Custom()


@pytest.mark.parametrize("homes", HOMES)
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_any_module_loads_and_its_buffers_come_from_where_they_must(tmp_path: Path, suffix: str, homes: str) -> None:
    source = Custom()
    source.steps.fill_(7)
    source.table.zero_()  # not persistent: the constructor's value is kept, not this one
    path = tmp_path / f"weights.{suffix}"
    save_file(source.state_dict(), path) if suffix == "safetensors" else torch.save(source.state_dict(), path)
    placed = load(make_context(tmp_path, path, make_custom, HOMES[homes]), tmp_path / "out")
    assert_same(state_of(placed), source.state_dict())
    assert torch.equal(placed.model.table, torch.arange(4.0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"linear.weight": None}, "1 missing: 'linear.weight'"),
        ({"extra": torch.ones(1)}, "1 unexpected: 'extra'"),
        ({"linear.weight": torch.ones(4, 3)}, "'linear.weight' is [4, 3] instead of [3, 4]"),
        ({"linear.weight": torch.ones(3, 4, dtype=torch.int32)}, "'linear.weight' is int32 where float32 belongs"),
        ({"steps": torch.tensor(1.5)}, "'steps' is float32 where int64 belongs"),
        ({"linear.weight": None, "scale": None, "extra": torch.ones(1)}, "2 missing: 'scale', 'linear.weight'; 1 unex"),
        ({f"x{i:02}": torch.ones(1) for i in range(25)}, "'x19' (and 5 more)"),
    ],
)
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_state_that_is_not_the_models_is_refused(tmp_path: Path, change: dict, words: str, suffix: str) -> None:
    state = {name: t for name, t in {**Custom().state_dict(), **change}.items() if t is not None}
    path = tmp_path / f"weights.{suffix}"
    save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    with pytest.raises(CheckpointError) as caught:
        load(make_context(tmp_path, path, make_custom, HOMES["both"]), tmp_path / "out")
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "out").iterdir())


def test_what_the_model_class_declares_ignorable_is_passed_over(tmp_path: Path) -> None:
    model = make_model("llama")
    folder = save_safetensors(model, tmp_path / "checkpoint")
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    context = make_context(tmp_path, folder, lambda: empty_model("llama", FLOAT32), HOMES["host"])
    assert_same(load(context, tmp_path / "out").model.state_dict(), model.state_dict())


def test_a_shard_that_changes_while_it_is_served_ends_the_run(tmp_path: Path) -> None:
    folder = save_safetensors(make_model("llama"), tmp_path / "checkpoint")
    context = make_context(tmp_path, folder, lambda: empty_model("llama", FLOAT32), HOMES["disk"])
    placed = load(context, tmp_path / "out")
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes())
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the file changed while it was being served"):
        placed.offloaded["lm_head.weight"]
