"""transformers' Trainer over a model that streams, whichever function loaded it: to the bit the plain model's run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tests.clients.doors import DOORS, Door, make_llama, plain

pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

TEXTS = [{"input_ids": torch.tensor([i, 2, 3, 4]), "labels": torch.tensor([i, 2, 3, 4])} for i in range(8)]
STEPS: list[dict[str, Any]] = [
    {"gradient_accumulation_steps": 2},
    {"gradient_checkpointing": True},
    {"bf16": True},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("trainer") / "llama")


def trainer(model: Any, folder: Path, **options: Any) -> Trainer:
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True}
    few = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 0.05}
    arguments = TrainingArguments(output_dir=str(folder), **quiet, **few, **options)
    return Trainer(peft.get_peft_model(model, lora), arguments, train_dataset=TEXTS, eval_dataset=TEXTS)


def learned(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("door", "options"),
    [*((door, {}) for door in DOORS), *((DOORS[number % len(DOORS)], options) for number, options in enumerate(STEPS))],
)
def test_it_trains_evaluates_and_resumes(door: Door, options: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    plainly = trainer(plain(checkpoint), tmp_path / "plain", **options)
    plainly.train()
    streamed = trainer(door(checkpoint), tmp_path / "streamed", **options)
    streamed.train()
    resumed = trainer(door(checkpoint), tmp_path / "streamed", **options)  # peft may have accelerate dispatch it anew
    resumed.train(resume_from_checkpoint=str(tmp_path / "streamed/checkpoint-2"))
    expected = learned(plainly.model)
    for one in (streamed, resumed):
        assert learned(one.model).keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in learned(one.model).items())
    assert streamed.evaluate()["eval_loss"] == plainly.evaluate()["eval_loss"]
