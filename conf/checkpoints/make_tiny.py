"""Makes the embedded model: ``python -m conf.checkpoints.make_tiny [--out FOLDER]``.

A Llama-architecture checkpoint of random bfloat16 weights, in the files that real checkpoints have (shards and their
index, configs, a byte-level BPE tokenizer), so that the first run needs no download and the tests have a model whose
every byte is known. Who runs this again gets the same bytes, and each step is chosen for that: the integers come from
``RandomState``, whose stream numpy has frozen; what is computed from them is exact or rounded once, with no call of a
math library that may differ from machine to machine; and the shards are written here, by the format's definition,
which needs neither torch nor one version of a library.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
SEED = 20
SHARD_BYTES = 1_000_000
VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS = 1024, 128, 384, 8
HEADS, KEY_VALUE_HEADS, HEAD_SIZE = 4, 2, 32
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TOKEN_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    **TOKEN_IDS,
    "dtype": "bfloat16",
    "head_dim": HEAD_SIZE,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KEY_VALUE_HEADS,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": VOCABULARY,
}

Weights = npt.NDArray[np.uint16]
"""bfloat16 values as their bits, since numpy has no such dtype."""
logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the checkpoint in the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Make the embedded model's files; the same bytes every time.")
    parser.add_argument("--out", type=Path, default=HERE / "tiny", metavar="FOLDER", help="default: %(default)s")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    make(parser.parse_args(arguments).out)


def make(folder: Path) -> None:
    """Write every file of the checkpoint into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", MODEL_CONFIG)
    write_json(folder / "generation_config.json", TOKEN_IDS)
    write_tokenizer(folder)
    write_shards(folder, dict(draw_weights(np.random.RandomState(SEED))))
    size = sum(path.stat().st_size for path in folder.iterdir())
    logger.info("%s: %d files, %d bytes", folder, len(list(folder.iterdir())), size)


def tensor_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every tensor, in the order of execution."""
    queries, keys = HEADS * HEAD_SIZE, KEY_VALUE_HEADS * HEAD_SIZE
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.self_attn.q_proj.weight", (queries, HIDDEN)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, HIDDEN)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, queries)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def draw_weights(random: np.random.RandomState) -> Iterator[tuple[str, Weights]]:
    """Yield every tensor by name.

    The spreads are larger than a fresh model's: with the usual 0.02 the layers add next to nothing to the residual
    stream, and the text is the last token repeated. The head gives nothing to special tokens and single bytes: greedy
    text is made of whole pieces of words, runs to the length asked for, and never holds a stray control character.
    """
    for name, shape in tensor_shapes():
        values = draw_normal(random, shape)
        values = 1 + 0.1 * values if len(shape) == 1 else values * 1.5 / shape[1] ** 0.5
        if name == "lm_head.weight":
            values[: len(SPECIAL_TOKENS) + 256] = 0
        yield name, to_bfloat16(values)


def draw_normal(random: np.random.RandomState, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Return values that are as good as normal, of mean 0 and spread 1: each the sum of twelve uniform integers.

    ``RandomState.normal`` goes through a logarithm, whose last bit is the machine's; a sum of integers is exact.
    """
    uniform = random.randint(0, 2**16, size=(12, *shape), dtype=np.uint16)
    normal: npt.NDArray[np.float64] = (uniform.sum(axis=0, dtype=np.int64) - 6 * (2**16 - 1)) / 2**16
    return normal


def to_bfloat16(values: npt.NDArray[np.float64]) -> Weights:
    """Return the bits of ``values`` in bfloat16, rounded to nearest, ties to even."""
    bits = values.astype("<f4").view("<u4")
    rounded: Weights = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded


def write_shards(folder: Path, weights: Mapping[str, Weights]) -> None:
    """Write ``weights`` in their order into shards of at most ``SHARD_BYTES``, and the index."""
    shards: list[dict[str, Weights]] = [{}]
    for name, values in weights.items():
        held = sum(other.nbytes for other in shards[-1].values())
        if held + values.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = values
    lies_in: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(folder / file_name, shard)
        lies_in |= dict.fromkeys(shard, file_name)
    total = sum(values.nbytes for values in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": lies_in}
    write_json(folder / "model.safetensors.index.json", index)


def write_safetensors(path: Path, weights: Mapping[str, Weights]) -> None:
    """Write one shard: the header's length in 8 bytes, the header in JSON padded to a multiple of 8, the data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, values in weights.items():
        end = offset + values.nbytes
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(values.tobytes() for values in weights.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_tokenizer(folder: Path) -> None:
    """Train the tokenizer on ``corpus.txt`` and write it; each prompt is to begin with the bos token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    paragraphs = (HERE / "corpus.txt").read_text(encoding="utf-8").split("\n\n")
    tokenizer.train_from_iterator((" ".join(text.split()) for text in paragraphs), trainer)
    bos = SPECIAL_TOKENS["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, TOKEN_IDS["bos_token_id"])]
    )
    write_json(folder / "tokenizer.json", json.loads(tokenizer.to_str()))
    details = {"clean_up_tokenization_spaces": False, "model_max_length": MODEL_CONFIG["max_position_embeddings"]}
    write_json(
        folder / "tokenizer_config.json", {**SPECIAL_TOKENS, **details, "tokenizer_class": "PreTrainedTokenizerFast"}
    )


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write ``value`` as JSON, in one encoding and with one kind of line end everywhere."""
    path.write_bytes((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


if __name__ == "__main__":
    main()
