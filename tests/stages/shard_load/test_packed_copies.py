"""Packed copies in the offload store: made once, grown tensor by tensor, bit for bit what the checkpoint holds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from offstage.pipeline.cache.block_sums import INDEX_NAME, find_store_damage
from offstage.pipeline.errors import CheckpointError, StorageError
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import PackedTensor, rest_bytes
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.empty_init.init import init_empty_weights
from offstage.stages.shard_load import OffloadedWeightsLoader
from offstage.stages.shard_load.offload_store import StoredTensor, open_store
from offstage.stages.shard_load.stored_weights import opened
from tests.stages.shard_load.checkpoints import FakeContext, assert_same, load, make_context, revive, state_of
from tests.stages.shard_load.test_offload_store import flipped

SIZES = {"vocab_size": 160, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = transformers.LlamaConfig(**SIZES, intermediate_size=192, num_key_value_heads=4)
MIXTRAL = transformers.MixtralConfig(
    **SIZES, intermediate_size=96, num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2
)


def make_model(config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32).to(dtype).eval()


def empty_model(config: Any) -> Any:
    with init_empty_weights():
        return transformers.AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.bfloat16).eval()


def context_of(root: Path, checkpoint: Path, config: Any, **keys: Any) -> FakeContext:
    """Return a context in which all lies on disk and is packed."""
    keys = {"make": partial(empty_model, config), "where": lambda _: "disk", "packs": True, **keys}
    return make_context(root, checkpoint, **keys)


def packed_of(placed: Any) -> dict[str, PackedTensor]:
    extents = placed.offloaded.extents.items()
    return {name: extent for name, extent in extents if isinstance(extent, PackedTensor)}


def store_files(root: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in root.rglob("*.zstd.dat")}


def test_what_streams_rests_packed_and_is_what_the_checkpoint_holds(tmp_path: Path) -> None:
    model = make_model(LLAMA)
    model.save_pretrained(tmp_path / "checkpoint")
    placed = load(context_of(tmp_path, tmp_path / "checkpoint", LLAMA), tmp_path / "out")
    assert_same(state_of(placed), model.state_dict())
    packed = packed_of(placed)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in packed} >= {"q_proj", "down_proj", "lm_head"}
    assert all(rest_bytes(tensor) < 0.75 * tensor.bytes for tensor in packed.values())
    norms = placed.offloaded.extents["model.norm.weight"]
    assert isinstance(norms, Extent)
    assert norms.file.name == "model.safetensors", "what is small is read from the checkpoint"
    report = json.loads((tmp_path / "out" / "load_report.json").read_text())
    assert report["packed"]["rest_bytes"] == sum(map(rest_bytes, packed.values()))
    assert report["stored"]["tensors"] == 0


@pytest.mark.parametrize("kind", ["safetensors", "bin", "cast"])
def test_experts_are_packed_so_that_each_is_read_alone(kind: str, tmp_path: Path) -> None:
    """One by one in the checkpoint as merged there, cast on the way, and out of a pickle."""
    model = make_model(MIXTRAL)
    saved = model.float() if kind == "cast" else model
    saved.save_pretrained(tmp_path / "checkpoint")
    if kind == "bin":
        file = tmp_path / "checkpoint" / "model.safetensors"
        torch.save(load_file(file), file.with_name("pytorch_model.bin"))
        file.unlink()
    model = model.to(torch.bfloat16)
    placed = load(context_of(tmp_path, tmp_path / "checkpoint", MIXTRAL, routes=True), tmp_path / "out")
    assert_same(state_of(placed), model.state_dict())
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert isinstance(placed.offloaded.extents[name], PackedTensor)
    for expert, row in enumerate(placed.offloaded.rows[name]):
        (piece,) = row
        assert isinstance(piece, PackedTensor)
        assert rest_bytes(piece) < 0.75 * piece.bytes
        assert torch.equal(read_extent(piece)[0], model.state_dict()[name][expert])


def test_a_second_run_packs_nothing_again_and_another_plan_only_what_is_new(tmp_path: Path) -> None:
    make_model(LLAMA).save_pretrained(tmp_path / "checkpoint")
    keys = {"offload_folder": str(tmp_path / "store")}
    first_layer = {"where": lambda name: "disk" if "layers.0" in name else "cpu"}
    some = context_of(tmp_path, tmp_path / "checkpoint", LLAMA, **first_layer, **keys)
    load(some, tmp_path / "out")
    first = store_files(tmp_path)
    assert first
    revive(some)
    assert store_files(tmp_path) == first
    load(context_of(tmp_path / "all", tmp_path / "checkpoint", LLAMA, **keys), tmp_path / "out2")
    both = store_files(tmp_path)
    assert both.keys() > first.keys()
    assert {name: both[name] for name in first} == first


NOISY = "model.layers.0.mlp.up_proj.weight"


def make_noisy_model(dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a model of which one weight doesn't shrink: every bit of it is noise."""
    model = make_model(LLAMA, dtype)
    weight = model.get_parameter(NOISY)
    noise = torch.randint(-(2**15), 2**15, weight.shape, dtype=torch.int16).view(torch.bfloat16).nan_to_num(1.0)
    with torch.no_grad():
        weight.copy_(noise)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["as it is", "cast"])
def test_what_does_not_shrink_is_there_under_the_next_plan_that_has_it_wait_packed(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """First all lies on disk; then there is room on the host, where all is to wait as it rests on disk."""
    model = make_noisy_model(dtype)
    model.save_pretrained(tmp_path / "checkpoint")
    wanted = model.to(torch.bfloat16).state_dict()
    for number, home in enumerate(("disk", "cpu", "disk")):
        root = tmp_path / str(number)
        keys = {"where": lambda _, home=home: home, "waits_packed": True, "offload_folder": str(tmp_path / "store")}
        context = context_of(root, tmp_path / "checkpoint", LLAMA, **keys)
        placed = load(context, root / "out")
        assert_same(state_of(placed), wanted)
        assert packed_of(placed)
        assert NOISY not in packed_of(placed)
        assert not state_of(placed)[NOISY].is_meta


def test_a_file_that_is_gone_leaves_no_other_open(tmp_path: Path) -> None:
    """As a shard that is removed while what it and others hold is to be packed."""
    files = []
    for name in ("there", "gone"):
        tmp_path.joinpath(name).write_bytes(bytes(8))
        status = tmp_path.joinpath(name).stat()
        files.append(ShardFile(name, tmp_path / name, 8, status.st_mtime_ns, ""))
    tmp_path.joinpath("gone").unlink()
    with (
        pytest.raises(CheckpointError, match="gone") as caught,
        opened([Extent(file, 0, "uint8", (8,)) for file in files]),
    ):
        pass
    assert caught.value.__traceback__ is not None  # whose frames hold what was opened
    assert not [link for link in Path("/proc/self/fd").iterdir() if link.resolve() == tmp_path / "there"]


def test_what_does_not_shrink_is_served_where_it_lies_and_looked_at_once(tmp_path: Path) -> None:
    model, name = make_noisy_model(), NOISY
    model.save_pretrained(tmp_path / "checkpoint")
    context = context_of(tmp_path, tmp_path / "checkpoint", LLAMA)
    placed = load(context, tmp_path / "out")
    assert_same(state_of(placed), model.state_dict())
    assert name not in packed_of(placed)
    assert placed.offloaded.extents[name].file.name == "model.safetensors"
    (index,) = tmp_path.rglob(INDEX_NAME)
    assert json.loads(index.read_text())[f"{name}.zstd"]["codec"] == "none"
    before = index.stat().st_mtime_ns
    revive(context)
    assert index.stat().st_mtime_ns == before


def test_one_store_has_plain_and_packed_tensors_side_by_side(tmp_path: Path) -> None:
    """The checkpoint must be cast: what is packed is packed from what was cast, what is small lies there plain."""
    model = make_model(LLAMA, torch.float32)
    model.save_pretrained(tmp_path / "checkpoint")
    keys = {"offload_folder": str(tmp_path / "store")}
    wanted = model.to(torch.bfloat16).state_dict()
    placed = load(context_of(tmp_path, tmp_path / "checkpoint", LLAMA, **keys), tmp_path / "out")
    assert_same(state_of(placed), wanted)
    names = {path.name for path in (tmp_path / "store").glob("*.dat")}
    assert "model.norm.weight.dat" in names
    assert "lm_head.weight.zstd.dat" in names
    assert "lm_head.weight.dat" not in names
    plain = context_of(tmp_path / "plain", tmp_path / "checkpoint", LLAMA, packs=False, **keys)
    assert_same(state_of(load(plain, tmp_path / "out2")), wanted)
    again = revive(context_of(tmp_path, tmp_path / "checkpoint", LLAMA, **keys))
    assert packed_of(again).keys() == packed_of(placed).keys()
    assert find_store_damage(tmp_path / "store") is None


def test_a_damaged_copy_is_said_when_it_is_read_and_made_again_by_the_next_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(LLAMA)
    model.save_pretrained(tmp_path / "checkpoint")
    context = context_of(tmp_path, tmp_path / "checkpoint", LLAMA)
    name = "model.layers.1.mlp.down_proj.weight"
    placed = load(context, tmp_path / "out")
    (path,) = tmp_path.rglob(f"{name}.zstd.dat")
    flipped(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight\.zstd\.dat: damaged at byte \d+"):
        placed.offloaded[name]
    assert not path.exists(), "it is set aside"
    assert_same(state_of(revive(context)), model.state_dict())
    assert path.exists()
    flipped(path, 5)
    assert "doesn't match its checksum" in str(find_store_damage(path.parent))
    assert_same(state_of(revive(context)), model.state_dict())
    assert "doesn't match its checksum" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.update(run=7),
        lambda entry: entry.update(tiles=entry["tiles"][:-1]),
        lambda entry: entry["tiles"][0].reverse(),
        lambda entry: entry["tiles"].append([2**40, 2**40]),
        lambda entry: entry.update(bytes=10**15),
        lambda entry: entry.update(codec="none"),
        lambda entry: entry.update(shape=[3]),
        lambda entry: entry.clear(),
    ],
)
def test_an_index_that_tells_something_else_serves_no_wrong_byte(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    model = make_model(LLAMA)
    model.save_pretrained(tmp_path / "checkpoint")
    context = context_of(tmp_path, tmp_path / "checkpoint", LLAMA)
    load(context, tmp_path / "out")
    (path,) = tmp_path.rglob(INDEX_NAME)
    index = json.loads(path.read_text())
    change(index["lm_head.weight.zstd"])
    path.write_text(json.dumps(index))
    with suppress(CheckpointError):  # it has other lengths than the tiles, which is found where they are read
        assert_same(state_of(revive(context)), model.state_dict())
    assert_same(state_of(revive(context)), model.state_dict())


KILLED = """
import sys
from pathlib import Path
import torch
from offstage.stages.shard_load import offload_store
from offstage.stages.shard_load.stored_weights import bytes_of, pack
offload_store._PUBLISH_BYTES = 30000
store = offload_store.open_store(Path(sys.argv[1]), "k")
tensor = offload_store.StoredTensor("bfloat16", (64, 256), ("source",), run=64 * 256)
for number in range(10**6):
    data = torch.full((64, 256), number % 50, dtype=torch.bfloat16)
    store.put_packed(f"t{number % 50}", tensor, pack(tensor, bytes_of(data)))
    if number == 5:
        store.publish()
        print("started", flush=True)
"""


def test_a_kill_leaves_copies_that_are_whole(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.kill()
    tensor = StoredTensor("bfloat16", (64, 256), ("source",), run=64 * 256)
    located = open_store(tmp_path, "k").find({f"t{number}": tensor for number in range(50)}, full=True)
    assert len(located) >= 6
    for name, copy in located.items():
        assert copy is not None
        assert bool((read_extent(copy) == int(name[1:])).all())


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(LLAMA).save_pretrained(tmp_path / "checkpoint")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(StorageError, match=r"offloaded tensors need .* are free; set offload_folder"):
        load(context_of(tmp_path, tmp_path / "checkpoint", LLAMA), tmp_path / "out")
    assert not store_files(tmp_path)


def test_a_disk_that_fills_up_while_packing_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no device that is always full here")
    make_model(LLAMA).save_pretrained(tmp_path / "checkpoint")
    context = context_of(tmp_path, tmp_path / "checkpoint", LLAMA)
    opened = Path.open

    def fill_up(self: Path, mode: str = "r", *args: Any, **keys: Any) -> Any:
        return opened(full, "wb") if mode == "xb" and "offload" in self.parts else opened(self, mode, *args, **keys)

    monkeypatch.setattr(Path, "open", fill_up)
    with pytest.raises(StorageError, match="No space left on device"):
        load(context, tmp_path / "out")
    monkeypatch.undo()
    assert packed_of(load(context, tmp_path / "out"))


def test_the_field_s_loader_knows_nothing_of_copies(tmp_path: Path) -> None:
    make_model(LLAMA, torch.float32).save_pretrained(tmp_path / "checkpoint")
    load(context_of(tmp_path, tmp_path / "checkpoint", LLAMA, offload_folder=str(tmp_path / "store")), tmp_path / "out")
    loader = OffloadedWeightsLoader(save_folder=tmp_path / "store")
    assert "model.norm.weight" in loader
    assert not [name for name in loader if "zstd" in name]
    assert all(tensor.dtype == torch.bfloat16 for tensor in loader.values())


def test_two_runs_that_pack_at_once_come_to_one_store(tmp_path: Path) -> None:
    model = make_model(MIXTRAL)
    model.save_pretrained(tmp_path / "checkpoint")
    keys = {"checkpoint": tmp_path / "checkpoint", "config": MIXTRAL, "offload_folder": str(tmp_path / "store")}
    models = [empty_model(MIXTRAL) for _ in range(2)]  # here: making one sets torch's dtype for all threads
    contexts = [
        context_of(tmp_path / str(number), make=lambda made=made: made, **keys) for number, made in enumerate(models)
    ]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda context: load(context, context.cache.with_name("out")), contexts))
    for placed in both:
        assert_same(state_of(placed), model.state_dict())
    assert find_store_damage(tmp_path / "store") is None
