"""Tiny checkpoints of every kind of model, each with the tokenizer or the processor that goes with it."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

transformers.utils.logging.disable_progress_bar()

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz", "weights", "wait", "offstage", "cue"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
VISION = {**SIZES, "image_size": 16, "patch_size": 4}


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_input_names=names, eos_token="[SEP]", **special)


def save(folder: Path, config: Any, kind: str, *beside: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Save a model of class ``kind`` with what goes ``beside`` it, in several shards, and return the folder."""
    torch.manual_seed(seed)
    getattr(transformers, kind)(config).to(dtype).save_pretrained(folder, max_shard_size="40KB")
    for part in beside:
        part.save_pretrained(folder)
    return folder


def bert(**more: Any) -> transformers.BertConfig:
    return transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=24, **SIZES, **more)


def vit(**more: Any) -> transformers.ViTConfig:
    return transformers.ViTConfig(**VISION, **more)


def vit_processor() -> Any:
    return transformers.ViTImageProcessor(size={"height": 16, "width": 16})


def clip() -> transformers.CLIPConfig:
    text = {**SIZES, "vocab_size": len(WORDS), "max_position_embeddings": 24, "eos_token_id": 3, "pad_token_id": 0}
    return transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=16)


def clip_processor() -> Any:
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    return transformers.CLIPProcessor(image_processor=images, tokenizer=tokenizer())


def wav2vec2(**more: Any) -> transformers.Wav2Vec2Config:
    heard = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
    places = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "vocab_size": len(WORDS)}
    return transformers.Wav2Vec2Config(**SIZES, **heard, **places, **more)


def t5() -> transformers.T5Config:
    return transformers.T5Config(
        vocab_size=len(WORDS), d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, decoder_start_token_id=0
    )


def save_image(file: Path, *, seed: int = 0, size: tuple[int, int] = (20, 18)) -> Path:
    from PIL import Image

    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(values).save(file)
    return file


def save_sound(file: Path, samples: int, *, seed: int = 0, rate: int = 16000) -> Path:
    values = np.random.default_rng(seed).integers(-3000, 3000, samples, dtype=np.int16)
    with wave.open(str(file), "wb") as out:
        out.setparams((1, 2, rate, 0, "NONE", ""))
        out.writeframes(values.astype("<i2").tobytes())
    return file
