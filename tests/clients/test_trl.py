"""trl's trainers of adapters over a model that streams, by each function that loads one: the plain run, to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.clients.doors import DOORS, Door, make_llama, plain

pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

TINY = Path(__file__).parents[2] / "conf" / "checkpoints" / "tiny"
TEXTS = [{"text": f"The value {number} is returned"} for number in range(8)]
PAIRS = [{"prompt": f"What is {n}?", "chosen": f" It is {n}", "rejected": " I can't say"} for n in range(8)]
KINDS = {"SFT": (TEXTS, {"max_length": 32}), "DPO": (PAIRS, {"max_length": 48})}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = AutoTokenizer.from_pretrained(TINY)
    found.pad_token = found.pad_token or found.eos_token
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    folder = make_llama(tmp_path_factory.mktemp("trl") / "llama", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return folder


def trained(kind: str, model: Any, tokenizer: Any, folder: Path) -> tuple[dict[str, torch.Tensor], float]:
    """Return what an adapter has learnt in three steps, and the loss then."""
    rows, options = KINDS[kind]
    torch.manual_seed(1)
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "bf16": False}
    few = {"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 0.05}
    arguments = getattr(trl, f"{kind}Config")(output_dir=str(folder), **quiet, **few, **options)
    data = datasets.Dataset.from_list(rows)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = getattr(trl, f"{kind}Trainer")(
        model, args=arguments, train_dataset=data, eval_dataset=data, peft_config=lora, processing_class=tokenizer
    )
    trainer.train()
    learned = {name: value for name, value in trainer.model.named_parameters() if value.requires_grad}
    return learned, trainer.evaluate()["eval_loss"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_an_adapter_and_evaluates(kind: str, checkpoint: Path, tokenizer: Any, tmp_path: Path) -> None:
    expected, loss = trained(kind, plain(checkpoint), tokenizer, tmp_path)
    doors: list[Door] = DOORS
    for door in doors:
        learned, streamed_loss = trained(kind, door(checkpoint), tokenizer, tmp_path)
        assert learned.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in learned.items()), door
        assert streamed_loss == loss
