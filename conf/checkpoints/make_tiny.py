"""Makes the embedded model: ``python -m offstage.conf.checkpoints.make_tiny WORK [--minutes 60] [--out FOLDER]``.

A small Llama-architecture model that has learnt English from the documentation of the packages installed here, in the
files that real checkpoints have (shards and their index, configs, a byte-level BPE tokenizer, a card), so that the
first run needs no download and still says something. What takes long is kept in the folder WORK: after a kill the same
command goes on where it was.

With ``--steps`` alone the same packages give the same bytes, on one kind of processor and with one version of torch.
With ``--minutes`` the schedule follows the clock, and the bytes don't come again.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, LlamaConfig

from offstage.conf.checkpoints import card, corpus, training

HERE = Path(__file__).parent
SEED = 20
SHARD_BYTES = 2_000_000
VOCABULARY = 3072
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TOKEN_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    **TOKEN_IDS,
    "dtype": "bfloat16",
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 192,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 6,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": VOCABULARY,
}
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Text:
    """The tokens of the corpus, each document between the bos and the eos token."""

    training: torch.Tensor
    held_out: torch.Tensor
    held_out_bytes: int
    """Bytes of the held-out documents, one more for the end of each."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the checkpoint as the command line says."""
    parser = argparse.ArgumentParser(description="Train the embedded model; after a kill, go on with the same command.")
    parser.add_argument("work", type=Path, metavar="WORK", help="the folder for the corpus and the state of training")
    parser.add_argument("--out", type=Path, default=HERE / "tiny", metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=20_000, help="the longest training (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end by then, the schedule too")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    make(given.work, given.out, training.Recipe(steps=given.steps, minutes=given.minutes, seed=SEED))


def make(work: Path, folder: Path, recipe: training.Recipe) -> None:
    """Gather, train and write every file of the checkpoint into ``folder``; what ``work`` has isn't made again."""
    work.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    gathered = corpus.read_or_gather(work / "corpus.json")
    write_tokenizer(folder, gathered.texts(held_out=False))
    text = encode(gathered, Tokenizer.from_file(str(folder / "tokenizer.json")))
    model = fresh_model()
    progress = training.train(model, text.training, recipe, state=work / "state.pt")
    model.bfloat16()
    loss = training.held_out_loss(model, text.held_out, recipe.context)
    write_checkpoint(folder, model.state_dict())
    figures = card.Figures(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        training_tokens=len(text.training),
        seen_tokens=progress.step * recipe.batches * recipe.rows * recipe.context,
        steps=progress.step,
        minutes=progress.seconds / 60,
        held_out_tokens=len(text.held_out),
        loss=loss,
        bits_a_byte=loss * len(text.held_out) / text.held_out_bytes / math.log(2),
    )
    (folder / "README.md").write_text(card.write(figures, gathered.shares()), encoding="utf-8")
    logger.info("%s: held-out loss %.3f nats a token, %.3f bits a byte", folder, loss, figures.bits_a_byte)


def write_tokenizer(folder: Path, texts: Sequence[str]) -> None:
    """Train the tokenizer on ``texts`` and write it; each prompt is to begin with the bos token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = SPECIAL_TOKENS["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, TOKEN_IDS["bos_token_id"])]
    )
    write_json(folder / "tokenizer.json", json.loads(tokenizer.to_str()))
    details = {"clean_up_tokenization_spaces": False, "model_max_length": MODEL_CONFIG["max_position_embeddings"]}
    write_json(
        folder / "tokenizer_config.json", {**SPECIAL_TOKENS, **details, "tokenizer_class": "PreTrainedTokenizerFast"}
    )


def encode(gathered: corpus.Corpus, tokenizer: Tokenizer) -> Text:
    """Return the tokens of the corpus; the documents to learn from are shuffled."""
    learnt, held_out = gathered.texts(held_out=False), gathered.texts(held_out=True)
    random.Random(SEED).shuffle(learnt)
    held_out_bytes = sum(len(text.encode()) + 1 for text in held_out)
    return Text(_tokens(tokenizer, learnt), _tokens(tokenizer, held_out), held_out_bytes)


def _tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> torch.Tensor:
    bos, eos = TOKEN_IDS["bos_token_id"], TOKEN_IDS["eos_token_id"]
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return torch.tensor([token for encoding in encodings for token in (bos, *encoding.ids, eos)], dtype=torch.int16)


def fresh_model() -> torch.nn.Module:
    """Return the model before its training, in float32."""
    torch.manual_seed(SEED)
    config = LlamaConfig(**{**MODEL_CONFIG, "dtype": "float32", "use_cache": False})
    # The plain formula of attention: its backward pass is faster on a processor than the fused one's.
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model


def write_checkpoint(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Write the configs, and ``weights`` in their order into shards of at most ``SHARD_BYTES`` with their index."""
    write_json(folder / "config.json", MODEL_CONFIG)
    write_json(folder / "generation_config.json", TOKEN_IDS)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in weights.items():
        if name == "lm_head.weight":
            continue  # tied to the embedding
        if sum(other.nbytes for other in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor.contiguous()
    lies_in: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        (folder / file_name).write_bytes(save(shard, metadata={"format": "pt"}))
        lies_in |= dict.fromkeys(shard, file_name)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": lies_in}
    write_json(folder / "model.safetensors.index.json", index)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write ``value`` as JSON, in one encoding and with one kind of line end everywhere."""
    path.write_bytes((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


if __name__ == "__main__":
    main()
