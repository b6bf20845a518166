"""The functions that load a model which streams, each with all of its weights on disk or on the host."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import offstage

ALL_ON_DISK = {"": "disk"}
TINY = Path(__file__).parents[2] / "conf" / "checkpoints" / "tiny"
Door = Callable[[Path], Any]


def make_llama(folder: Path, **options: Any) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64, **options}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    return folder


def words() -> Any:
    """Return the embedded model's tokenizer, which can pad."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def make_llama_of_words(folder: Path) -> Path:
    """Write a Llama with the tokenizer ``words``."""
    tokenizer = words()
    make_llama(folder, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return folder


def class_of(checkpoint: Path) -> Any:
    (name,) = AutoConfig.from_pretrained(checkpoint).architectures
    return getattr(transformers, name)


def plain(checkpoint: Path) -> Any:
    return class_of(checkpoint).from_pretrained(checkpoint).eval()


def load(checkpoint: Path) -> Any:
    cache = checkpoint.with_name("cache")  # what one test finds out of the model the next one knows
    return offstage.load(checkpoint, device_map={"": "disk"}, cache=cache, max_length=64).model


def from_pretrained(checkpoint: Path) -> Any:
    return offstage.from_pretrained(
        checkpoint, device_map=ALL_ON_DISK, cache=checkpoint.with_name("cache"), max_length=64
    )


def load_checkpoint_and_dispatch(checkpoint: Path) -> Any:
    with offstage.init_empty_weights():
        model = class_of(checkpoint)(AutoConfig.from_pretrained(checkpoint))
    return offstage.load_checkpoint_and_dispatch(model.eval(), checkpoint, device_map=ALL_ON_DISK)


def dispatch_model(checkpoint: Path) -> Any:
    folder = tempfile.mkdtemp(dir=checkpoint.parent)
    return offstage.dispatch_model(plain(checkpoint), ALL_ON_DISK, main_device="cpu", offload_dir=folder)


def cpu_offload(checkpoint: Path) -> Any:
    return offstage.cpu_offload(plain(checkpoint), "cpu")


def disk_offload(checkpoint: Path) -> Any:
    return offstage.disk_offload(plain(checkpoint), tempfile.mkdtemp(dir=checkpoint.parent), "cpu")


def losses_of(model: Any, optimiser: torch.optim.Optimizer, tokens: torch.Tensor) -> list[float]:
    """Train ``model`` for three steps, and return their losses."""
    losses = []
    for _ in range(3):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss))
    return losses


DOORS: list[Door] = [load, from_pretrained, load_checkpoint_and_dispatch, dispatch_model, cpu_offload, disk_offload]
