"""Tiny checkpoints of models that see and hear, each with a processor saved beside it, and images and sounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.stages.inputs.test_media import save_wav

TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 14,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{{ p['text'] if p['type'] == 'text' else '<image>' }}{% endfor %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}me:{% endif %}"
)


def alphabet(*special: str) -> dict[str, int]:
    """Return a vocabulary of bytes, after tokens for the ends of texts and the ``special`` ones."""
    words = ["<pad>", "<s>", "</s>", "<unk>", *special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    return {word: number for number, word in enumerate(words)}


def tokenizer(*special: str) -> hf.PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE(vocab=alphabet(*special), merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    ends = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, **ends, additional_special_tokens=list(special))


def llava(side: int = 28, **wide: int) -> tuple[Any, Any]:
    """Return a model of images of ``side`` pixels a side; ``wide`` are other sizes of its encoder."""
    words = tokenizer("<image>")
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**{**VISION, **wide}, image_size=side, projection_dim=16),
        text_config=hf.LlamaConfig(**TEXT, vocab_size=len(words)),
        image_token_index=words.convert_tokens_to_ids("<image>"), vision_feature_layer=-1,
    )  # fmt: skip
    images = hf.CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    processor = hf.LlavaProcessor(
        images, words, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )  # fmt: skip
    return hf.LlavaForConditionalGeneration(config), processor


def idefics3() -> tuple[Any, Any]:
    words = tokenizer("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    config = hf.Idefics3Config(
        vision_config={**VISION, "image_size": 56}, text_config=hf.LlamaConfig(**TEXT, vocab_size=len(words)),
        image_token_id=words.convert_tokens_to_ids("<image>"), scale_factor=2, pad_token_id=0,
    )  # fmt: skip
    images = hf.Idefics3ImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    return hf.Idefics3ForConditionalGeneration(config), hf.Idefics3Processor(images, words, image_seq_len=4)


def paligemma() -> tuple[Any, Any]:
    words = tokenizer("<image>")
    config = hf.PaliGemmaConfig(
        vision_config={"model_type": "siglip_vision_model", **VISION, "image_size": 28, "projection_dim": 32},
        text_config={"model_type": "gemma", **TEXT, "head_dim": 8, "vocab_size": len(words)},
        image_token_index=words.convert_tokens_to_ids("<image>"), projection_dim=32,
    )  # fmt: skip
    images = hf.SiglipImageProcessor(size={"height": 28, "width": 28})
    images.image_seq_length = 4
    return hf.PaliGemmaForConditionalGeneration(config), hf.PaliGemmaProcessor(images, words)


def qwen2_vl() -> tuple[Any, Any]:
    """Return a model whose images have as many tokens as they are large; its processor needs torchvision."""
    words = tokenizer("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
    number = words.convert_tokens_to_ids
    config = hf.Qwen2VLConfig(
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2},
        text_config={
            **TEXT, "vocab_size": len(words),
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0},
        },
        image_token_id=number("<|image_pad|>"), video_token_id=number("<|video_pad|>"),
        vision_start_token_id=number("<|vision_start|>"), vision_end_token_id=number("<|vision_end|>"),
    )  # fmt: skip
    images = hf.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=28 * 28 * 40)
    return hf.Qwen2VLForConditionalGeneration(config), hf.Qwen2VLProcessor(images, words, hf.Qwen2VLVideoProcessor())


def whisper(**wide: int) -> tuple[Any, Any]:
    """Return a model of audio; ``wide`` are other sizes of it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = hf.WhisperTokenizer(vocab={letter: number for number, letter in enumerate(letters)}, merges=[])
    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
    words.add_tokens(special, special_tokens=True)
    end, start, *_ = words.convert_tokens_to_ids(special)
    sizes = {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_target_positions": 64,
    }  # fmt: skip
    config = hf.WhisperConfig(
        **{**sizes, **wide}, vocab_size=len(words), bos_token_id=end, eos_token_id=end, pad_token_id=end,
        decoder_start_token_id=start,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config), hf.WhisperProcessor(hf.WhisperFeatureExtractor(), words)


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "llava": llava, "idefics3": idefics3, "paligemma": paligemma, "qwen2_vl": qwen2_vl, "whisper": whisper,
}  # fmt: skip


def save(folder: Path, made: str | tuple[Any, Any]) -> Path:
    """Write the checkpoint that ``made`` is, or names, with random weights into ``folder``, its processor beside it."""
    torch.manual_seed(7)
    hf.logging.disable_progress_bar()
    model, processor = MODELS[made]() if isinstance(made, str) else made
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 0.1)
    model.save_pretrained(folder, max_shard_size="100KB" if isinstance(made, str) else "1GB")
    processor.save_pretrained(folder)
    return folder


def tell_languages(folder: Path) -> Path:
    """Have the whisper in ``folder`` be one of several languages and tasks, as its config says; return the folder."""
    number = hf.AutoProcessor.from_pretrained(folder).tokenizer.convert_tokens_to_ids
    file = folder / "generation_config.json"
    spoken = {
        "is_multilingual": True, "lang_to_id": {"<|en|>": number("<|en|>")},
        "task_to_id": {"transcribe": number("<|transcribe|>")}, "no_timestamps_token_id": number("<|notimestamps|>"),
    }  # fmt: skip
    defaults = {name: value for name, value in json.loads(file.read_text()).items() if name != "_from_model_config"}
    file.write_text(json.dumps(defaults | spoken))
    return folder


def picture(file: Path, size: tuple[int, int] = (60, 40), seed: int = 0) -> Path:
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).save(file)
    return file


def recording(file: Path, seconds: float = 1.0, rate: int = 16000) -> Path:
    return save_wav(file, 0.5 * np.sin(np.arange(int(seconds * rate)) / 9), rate=rate)
