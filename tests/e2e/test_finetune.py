"""Training by the command: its weights are bit for bit those of a plain loop of torch's, whatever kills it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, PretrainedConfig

from offstage.pipeline.cache.sealed_files import read_sealed
from offstage.stages.finetune import training
from offstage.stages.finetune.sequences import derive, pick
from offstage.stages.finetune.steps import Trainer
from offstage.stages.plan.budgets import LEAST_MARGIN, LIBRARY_BYTES
from tests.benchmarks.caps import can_cap
from tests.e2e.conftest import Finished, Replay, kill_when, record_of, start, wait_for

Run = Callable[..., Finished]
EMBEDDED = Path(__file__).parents[2] / "conf" / "checkpoints" / "tiny"
WORDS = 3072
MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=WORDS, max_position_embeddings=64,
    ),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=WORDS, n_positions=64),
}  # fmt: skip
WINDOW = 24
GIVEN = ("stages=finetune", "model=pretrained", f"model.tokenizer={EMBEDDED}", "finetune.text_file=text.txt")
SMALL = (f"finetune.window={WINDOW}", "finetune.batch_size=2", "finetune.learning_rate=0.003")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small Llama in float32."""
    return make(tmp_path_factory.mktemp("llama"), "llama", torch.float32)


def write_text(folder: Path) -> None:
    words = "The weights wait offstage until their cue, and the model returns a tensor of the same shape. "
    folder.joinpath("text.txt").write_text(words * 12)


def make(folder: Path, name: str, dtype: torch.dtype) -> Path:
    """Write a checkpoint of random weights in several files; return its folder."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(MODELS[name], dtype=dtype)
    model.save_pretrained(folder / "checkpoint", max_shard_size="150KB")
    return folder / "checkpoint"


@pytest.fixture(scope="module")
def described(described: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache that knows the small Llama too: most of a small training is to find out what its step holds."""
    folder = tmp_path_factory.mktemp("described")
    write_text(folder)
    record_of(folder, described, *GIVEN, *SMALL, f"model.path={checkpoint}", "stop_after=plan")
    shutil.rmtree(folder / "outputs/cache/plan")
    return folder / "outputs/cache"


@pytest.fixture(scope="module")
def whole(described: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the outputs of three steps that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    write_text(folder)
    path = record_of(folder, described, *GIVEN, *SMALL, f"model.path={checkpoint}", "finetune.steps=3")
    return list(json.loads(path.read_text())["outputs"])


def artifact(finished: Finished) -> Path:
    assert finished.code == 0, finished.err
    return Path(finished.record["stages"][-1]["artifact"])


def plain_loop(model: Any, folder: Path, *, steps: int, accumulation: int = 1, clip: float = 1.0) -> list[float]:
    """Train ``model`` with nothing but torch and transformers, as the defaults say; return the losses."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    ids = torch.tensor(tokenizer(folder.joinpath("text.txt").read_text())["input_ids"])
    sequences = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    model.train()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=0.003, weight_decay=0.01, foreach=False)
    losses = []
    for step in range(steps):
        total = 0.0
        for batch in range(step * accumulation, (step + 1) * accumulation):
            rows = pick(sequences, seed=0, begin=2 * batch, count=2)
            torch.manual_seed(derive(0, "dropout", batch))
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
            (loss / accumulation).backward()
            total += float(loss.detach())
        pieces = [each.grad.flatten().split(2**16 if each.dtype == torch.bfloat16 else 2**30) for each in learning]
        norms = [torch.stack([torch.linalg.vector_norm(one, dtype=torch.float32) for one in some]) for some in pieces]
        norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(some) for some in norms])))
        for parameter in learning if norm > clip else ():
            parameter.grad.mul_(clip / norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / accumulation)
    return losses


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.float32), ("gpt2", torch.bfloat16)], ids=str)
def test_tuned_weights_are_bitwise_those_of_a_plain_loop_and_load_again(
    name: str, dtype: torch.dtype, tmp_path: Path, offstage_here: Run
) -> None:
    write_text(tmp_path)
    checkpoint = make(tmp_path, name, dtype)
    reference = AutoModelForCausalLM.from_pretrained(checkpoint)
    done = offstage_here(
        *GIVEN, *SMALL, f"model.path={checkpoint}", "finetune.steps=6", "finetune.gradient_accumulation=2"
    )
    tuned = artifact(done) / "checkpoint"
    losses = plain_loop(reference, tmp_path, steps=6, accumulation=2)
    steps = [output for output in done.record["outputs"] if output["name"].startswith("step")]
    assert [step["loss"] for step in steps] == losses
    assert losses[-1] < losses[0], "nothing was learnt"
    again = AutoModelForCausalLM.from_pretrained(tuned)
    assert again.dtype == dtype
    for (key, weight), (_, wanted) in zip(again.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(weight, wanted), key
    if name == "gpt2":
        return
    asked = ("model=pretrained", f"model.path={tuned}", "generate.prompts=['The weights']", "generate.max_new_tokens=4")
    loaded = offstage_here(*asked)
    assert loaded.code == 0, loaded.err
    ids = torch.tensor([AutoTokenizer.from_pretrained(tuned)("The weights")["input_ids"]])
    expected = again.eval().generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :].tolist()
    assert loaded.tokens == [expected]


def test_a_step_is_told_in_the_record_which_can_be_replayed_and_a_second_run_is_served(
    checkpoint: Path, tmp_path: Path, offstage_here: Run, replay: Replay
) -> None:
    write_text(tmp_path)
    given = (*GIVEN, *SMALL, f"model.path={checkpoint}", "finetune.steps=3", "finetune.optimizer=sgd")
    done = offstage_here(*given)
    rows = [json.loads(line) for line in artifact(done).joinpath("steps.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert all(row["gradient_norm"] > 0 and row["seconds"] > 0 and row["held_bytes"]["cpu"] > 0 for row in rows)
    assert "the tuned weights are in" in done.out
    other_pace = offstage_here(*given, "finetune.save_every=1")
    assert other_pace.cached["finetune"]
    assert other_pace.record["outputs"] == done.record["outputs"]
    assert [step["loss"] for step in done.record["steps"]] == [row["loss"] for row in rows]
    code, out, err = replay(min(tmp_path.glob("outputs/runs/*/*")))
    assert code == 0, (out, err)


TOGETHER = {
    "finetune.text_file=gone.txt": "is no file; give one of text in UTF-8",
    "finetune.window=1": "finetune.window: 1 is no whole number from 2 or null",
    "finetune.steps=0": "finetune.steps: 0 is no whole number from 1",
    "finetune.batch_size=-1": "finetune.batch_size: -1 is no whole number from 1",
    "finetune.gradient_accumulation=0": "finetune.gradient_accumulation: 0 is no whole number from 1",
    "finetune.save_every=0": "finetune.save_every: 0 is no whole number from 1",
    "finetune.learning_rate=nan": "finetune.learning_rate: nan is no rate",
    "finetune.weight_decay=inf": "finetune.weight_decay: inf is no decay",
    "finetune.clip_norm=0": "finetune.clip_norm: 0 is no norm",
    "finetune.activation_offload.ratio=nan": "finetune.activation_offload.ratio: nan is no share of bytes",
    "finetune.lora={r: 0, alpha: inf, target_modules: []}": "finetune.lora.r: 0 is no whole number from 1",
    "finetune.seed=-1": "finetune.seed: -1 is no seed",
}
MISTYPED = {
    "finetune.optimizer=adam": "finetune.optimizer: 'adam' is none of adamw, sgd (did you mean 'adamw'?)",
    "finetune.activation_offload.ratio=some": "finetune.activation_offload.ratio: 'some' is",
    "finetune.lora={rank: 8}": "finetune.lora.rank: unknown key",
    "+finetune.step=3": "finetune.step: unknown key (did you mean 'steps'?)",
    "finetune.checkpointing=1": "finetune.checkpointing: 1 is neither true nor false",
}
OF_THE_MODEL = {
    "finetune.text_file=short.txt": "has 5 tokens, and a sequence has 24",
    "finetune.window=65": "finetune.window: 65 tokens are more than the model's context of 64",
    "model.class=LlamaModel": "model.class: LlamaModel has no labels of the token that comes next",
    "model.tokenizer=null": "finetune.text_file: the checkpoint has no tokenizer",
}


@pytest.mark.parametrize("faults", [TOGETHER, MISTYPED, *({given: words} for given, words in OF_THE_MODEL.items())])
def test_bad_input_is_said_before_any_weight_is_read(
    faults: dict[str, str], checkpoint: Path, tmp_path: Path, offstage_here: Run
) -> None:
    write_text(tmp_path)
    tmp_path.joinpath("short.txt").write_text("wait wait wait")
    done = offstage_here(*GIVEN, *SMALL, f"model.path={checkpoint}", *faults)
    assert done.code == 2
    for words in faults.values():
        assert words in done.err
    assert "Traceback" not in done.err
    assert not tmp_path.joinpath("outputs/cache/shard_load").exists()


def test_an_adapter_that_has_no_place_is_said(checkpoint: Path, tmp_path: Path, offstage_here: Run) -> None:
    pytest.importorskip("peft", reason="the extra adapter isn't installed")
    write_text(tmp_path)
    done = offstage_here(*GIVEN, *SMALL, f"model.path={checkpoint}", "finetune.lora={target_modules: [qproj]}")
    assert done.code == 2
    assert "finetune.lora: it has no place in LlamaForCausalLM" in done.err


def test_killed_it_goes_on_from_the_saved_state_to_bitwise_the_same_weights(tmp_path: Path, offstage_here: Run) -> None:
    write_text(tmp_path)
    checkpoint = make(tmp_path, "gpt2", torch.bfloat16)
    given = (*GIVEN, *SMALL, f"model.path={checkpoint}", "finetune.steps=40", "finetune.save_every=7")
    with start(tmp_path, *given) as process:
        wait_for(lambda: list(tmp_path.glob("outputs/cache/finetune/.tmp-*/.state/state.json")), process)
        process.kill()
    (left,) = tmp_path.glob("outputs/cache/finetune/.tmp-*")
    state = read_sealed(left / ".state" / "state.json")
    assert 0 < state["step"] < 40
    resumed = offstage_here(*given)
    assert resumed.code == 0, resumed.err
    assert resumed.record["metrics"]["taken_steps"] == 40 - state["step"]
    assert resumed.record["metrics"]["earlier_steps"] == state["step"]
    assert f"; went on after {state['step']} steps, which the times aren't of" in resumed.out
    assert not list(artifact(resumed).glob(".state")), "the state is left in the artifact"
    tmp_path.joinpath("outputs/cache/finetune").rename(tmp_path / "before")
    whole = offstage_here(*given)
    assert whole.record["metrics"]["taken_steps"] == 40
    assert "earlier_steps" not in whole.record["metrics"]
    assert whole.record["outputs"] == resumed.record["outputs"]


def test_killed_as_its_weights_are_saved_it_has_no_step_to_take_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offstage_here: Run
) -> None:
    write_text(tmp_path)
    given = (*GIVEN, *SMALL, f"model.path={checkpoint}", "finetune.steps=5", "finetune.save_every=2")
    whole = offstage_here(*given)
    artifact(whole).parent.rename(tmp_path / "before")
    kept = training.save_model

    def save_and_end(model: Any, node: Any, folder: Path) -> None:
        kept(model, node, folder)
        folder.joinpath("stray.bin").write_text("half a file")
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "save_model", save_and_end)
    assert offstage_here(*given).code == 130
    monkeypatch.setattr(training, "save_model", kept)
    resumed = offstage_here(*given)
    assert resumed.code == 0, resumed.err
    assert resumed.record["metrics"]["taken_steps"] == 0
    assert resumed.record["outputs"] == whole.record["outputs"]
    assert not list(artifact(resumed).rglob("stray.bin"))


@pytest.mark.parametrize("sign", ["checkpoint", "manifest.json"])
def test_killed_in_its_last_moments_it_ends_with_the_same_weights(
    sign: str, checkpoint: Path, whole: list[dict[str, Any]], tmp_path: Path, offstage_here: Run
) -> None:
    write_text(tmp_path)
    given = (*GIVEN, *SMALL, f"model.path={checkpoint}", "finetune.steps=3")
    killed = kill_when(lambda: list(tmp_path.glob(f"outputs/cache/finetune/.tmp-*/{sign}")), start(tmp_path, *given))
    resumed = offstage_here(*given)
    assert artifact(resumed)
    assert resumed.record["metrics"]["taken_steps"] == (3 if resumed.cached["finetune"] else 0), killed
    assert resumed.record["outputs"] == whole


@pytest.mark.long_form
def test_a_training_that_was_killed_twice_tells_each_step_once(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offstage_here: Run
) -> None:
    write_text(tmp_path)
    given = (*GIVEN, *SMALL, f"model.path={checkpoint}", "finetune.steps=9", "finetune.save_every=3")
    take = Trainer.take
    for last in (4, 7):

        def take_or_end(trainer: Trainer, step: int, last: int = last) -> Any:
            if step > last:
                raise KeyboardInterrupt
            return take(trainer, step)

        monkeypatch.setattr(Trainer, "take", take_or_end)
        assert offstage_here(*given).code == 130
    monkeypatch.setattr(Trainer, "take", take)
    done = offstage_here(*given)
    assert done.record["metrics"]["taken_steps"] == 3
    assert [output["name"] for output in done.record["outputs"][:9]] == [f"step {number}" for number in range(1, 10)]


def test_a_new_adapter_learns_as_pefts_own_and_loads_as_an_adapter(
    checkpoint: Path, tmp_path: Path, offstage_here: Run
) -> None:
    peft = pytest.importorskip("peft", reason="the extra adapter isn't installed")
    write_text(tmp_path)
    given = (*GIVEN, *SMALL, f"model.path={checkpoint}", "finetune.steps=4")
    lora = "finetune.lora={r: 4, alpha: 8, target_modules: [q_proj, down_proj]}"
    done = offstage_here(*given, lora)
    tuned = artifact(done) / "checkpoint"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    reference = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    )
    for name, weight in reference.named_parameters():
        if ".lora_A." in name:
            generator = torch.Generator().manual_seed(derive(0, "lora", name.removeprefix("base_model.model.")))
            torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
    losses = plain_loop(reference, tmp_path, steps=4)
    assert [output["loss"] for output in done.record["outputs"][:4]] == losses
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), tuned)
    learned, wanted = (peft.get_peft_model_state_dict(one) for one in (loaded, reference))
    assert learned.keys() == wanted.keys()
    assert all(torch.equal(learned[name], wanted[name]) for name in learned)
    further = offstage_here(*given, f"model.adapter={tuned}", "device_map=disk", "storage.io=direct")
    assert [output["loss"] for output in further.record["outputs"][:4]] == plain_loop(reference, tmp_path, steps=4)
    assert further.record["metrics"]["streamed_bytes_per_forward"] > 0


def test_weights_that_would_be_streamed_are_refused_with_the_least_budget_that_works(
    checkpoint: Path, tmp_path: Path, offstage_here: Run
) -> None:
    write_text(tmp_path)
    given = (*GIVEN, *SMALL, f"model.path={checkpoint}", "finetune.steps=1", "device_map=sequential")
    refused = offstage_here(*given, "max_memory.cpu=500kB")
    assert refused.code == 4
    assert len(refused.err.strip().splitlines()) == 1
    assert "'model.embed_tokens.weight' and 20 more would wait on disk, and what is streamed can't" in refused.err
    assert "finetune.lora={r: 8}" in refused.err
    assert not tmp_path.joinpath("outputs/cache/shard_load").exists()
    least = int(refused.err.partition("the least that works is ")[2].split()[0])
    assert offstage_here(*given, f"max_memory.cpu={least}").code == 0


def losses_of(finished: Finished) -> list[dict[str, Any]]:
    assert finished.code == 0, finished.err
    return [output for output in finished.record["outputs"] if output["name"].startswith("step")]


@pytest.mark.long_form
def test_what_is_offloaded_changes_no_bit(checkpoint: Path, tmp_path: Path, offstage_here: Run) -> None:
    write_text(tmp_path)
    given = (*GIVEN, *SMALL, f"model.path={checkpoint}", "finetune.steps=2", "finetune.batch_size=8")
    plain = offstage_here(*given)
    places = {
        "disk": ("finetune.activation_offload={ratio: 0.5, target: disk}",),
        "simulated": (
            "finetune.activation_offload={ratio: 1.0}", "finetune.checkpointing=true", "hardware=2x24gb",
            "max_memory={0: 1GB}",
        ),
    }  # fmt: skip
    for place, options in places.items():
        done = offstage_here(*given, *options)
        assert losses_of(done) == losses_of(plain), place
        metrics = done.record["metrics"]
        saved = metrics["offloaded_activation_bytes"] + metrics["kept_activation_bytes"]
        assert metrics["offloaded_activation_bytes"] / saved == pytest.approx(metrics["offload_ratio"], abs=0.02)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return what trains a model whose activations are far larger than its weights."""
    folder = tmp_path_factory.mktemp("deep")
    write_text(folder)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=384, num_hidden_layers=8, num_attention_heads=4, vocab_size=WORDS
    )
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "checkpoint")
    asked = ("finetune.window=64", "finetune.batch_size=16", "finetune.steps=2", "storage.io=direct")
    return (*GIVEN, f"finetune.text_file={folder / 'text.txt'}", f"model.path={folder / 'checkpoint'}", *asked)


def test_a_ratio_left_open_is_the_least_that_fits(deep: tuple[str, ...], offstage_here: Run) -> None:
    given = (*deep, "stop_after=plan", "finetune.activation_offload={ratio: auto, target: disk}")
    roomy = offstage_here(*given, "hardware.host={memory: 20GB}")  # described as those below: the same process
    assert json.loads(artifact(roomy).joinpath("plan.json").read_text())["offload_ratio"] == 0
    whole, ratios = roomy.record["memory"]["predicted"]["cpu"], []
    for less in (30_000_000, 60_000_000):
        memory = (whole - less + LIBRARY_BYTES) / (1 - LEAST_MARGIN)
        done = offstage_here(*given, f"hardware.host={{memory: {round(memory)}}}")
        assert done.code == 0, done.err
        plan = json.loads(artifact(done).joinpath("plan.json").read_text())
        ratios.append(plan["offload_ratio"])
        assert done.record["memory"]["predicted"]["cpu"] <= memory
    assert 0 < ratios[0] < ratios[1] < 1
    refused = offstage_here(*given, "hardware.host={memory: 500MB}")
    assert refused.code == 4
    assert "a training step takes" in refused.err


@pytest.mark.long_form
@pytest.mark.of_the_process("what it holds is measured, and a fork shares memory with its server")
@pytest.mark.skipif(not can_cap(), reason="may not make memory cgroups")
def test_a_training_lives_under_what_was_predicted_of_it(deep: tuple[str, ...], offstage: Run) -> None:
    offload = ("max_memory.cpu=20MB", "finetune.activation_offload={ratio: 0.8, target: disk}")
    done = offstage(*deep, "enforce_memory=true", *offload)
    assert done.code == 0, done.err
    memory = done.record["memory"]
    assert done.record["enforcement"]["enforced"]
    assert done.record["enforcement"]["bytes"] < 1.1 * memory["predicted"]["cpu"]
    assert 0.92 < memory["measured"]["cpu"] / memory["predicted"]["cpu"] < 1.05, "pages that are shared aren't counted"
