"""stages=forward: what any model returns, streamed from disk, is bit for bit what the plain one returns."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.e2e import checkpoints_of_kinds as kinds, media_checkpoints as media
from tests.e2e.conftest import Finished, Replay
from tests.long_form import in_ci

Run = Callable[..., Finished]
Tensors = dict[str, torch.Tensor]

STREAMED = ("device_map=disk", "max_memory.cpu=1MB", "storage.io=direct")
TEXTS = ["weights wait", "a b c d e f", "offstage", "g h until cue"]


@pytest.fixture
def forward(offstage_here: Run, tmp_path: Path) -> Callable[..., tuple[Tensors, dict[str, Any]]]:
    """Return a function that runs a forward, all weights streamed, and returns the outputs and forward.json."""

    def run(*arguments: str) -> tuple[Tensors, dict[str, Any]]:
        finished = offstage_here("stages=forward", "model=pretrained", *STREAMED, *arguments)
        assert finished.code == 0, finished.err
        folder = Path(finished.record["stages"][-1]["artifact"])
        return load_file(folder / "outputs.safetensors"), json.loads((folder / "forward.json").read_text())

    return run


def plain(folder: Path, kind: str, arguments: Any, **options: Any) -> Any:
    model = getattr(transformers, kind).from_pretrained(folder).eval()
    with torch.no_grad():
        return model(**dict(arguments), **options)


def listed(paths: list[Path]) -> str:
    return "[" + ",".join(map(str, paths)) + "]"


def equal(outputs: Tensors, expected: Any) -> None:
    for name, tensor in outputs.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("dtype", in_ci(torch.bfloat16, of=[torch.float32, torch.bfloat16]), ids=str)
def test_embeddings_of_bert(forward: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    folder = kinds.save(tmp_path / "bert", kinds.bert(), "BertModel", kinds.tokenizer(), dtype=dtype)
    Path("texts.txt").write_text("\n\n".join(TEXTS))
    outputs, said = forward(f"model.path={folder}", "forward.texts_file=texts.txt", "forward.batch_size=2",
                          "forward.pooling=mean", "forward.normalize=true")  # fmt: skip
    assert said["together"] == [[1, 3], [0, 2]]
    for rows in said["together"]:
        encoded = kinds.tokenizer()([TEXTS[row] for row in rows], padding=True, return_tensors="pt")
        hidden = plain(folder, "BertModel", encoded).last_hidden_state.float()
        mask = encoded["attention_mask"][:, :, None].float()
        mean = (hidden * mask).sum(1) / mask.sum(1)
        assert torch.equal(outputs["embeddings"][rows], torch.nn.functional.normalize(mean, dim=-1))
    assert outputs.keys() == {"embeddings"}


def test_rows_of_unlike_length_are_padded_and_the_mask_says_so(forward: Any, tmp_path: Path) -> None:
    folder = kinds.save(tmp_path / "bert", kinds.bert(), "BertModel", kinds.tokenizer())
    outputs, said = forward(f"model.path={folder}", f"forward.texts={json.dumps(TEXTS)}", "forward.batch_size=1",
                          "forward.outputs=[last_hidden_state,hidden_states]")  # fmt: skip
    assert outputs["attention_mask"].sum(1).tolist() == [4, 8, 3, 6]
    assert said["together"] == [[1], [3], [0], [2]]
    for row, text in enumerate(TEXTS):
        encoded = kinds.tokenizer()(text, return_tensors="pt")
        expected, length = plain(folder, "BertModel", encoded, output_hidden_states=True), encoded["input_ids"].shape[1]
        assert torch.equal(outputs["last_hidden_state"][row, :length], expected.last_hidden_state[0])
        assert torch.equal(outputs["hidden_states.1"][row, :length], expected.hidden_states[1][0])
        assert not outputs["last_hidden_state"][row, length:].any()


def test_a_classifier_says_its_labels(forward: Any, tmp_path: Path) -> None:
    labels = {0: "bad", 1: "so-so", 2: "good"}
    config = kinds.bert(id2label=labels)
    folder = kinds.save(tmp_path / "clf", config, "BertForSequenceClassification", kinds.tokenizer())
    outputs, said = forward(f"model.path={folder}", "forward.texts=[[a b,c d e],[weights,cue]]")
    encoded = kinds.tokenizer()(["a b", "weights"], ["c d e", "cue"], padding=True, return_tensors="pt")
    expected = plain(folder, "BertForSequenceClassification", encoded).logits
    equal(outputs, {"logits": expected})
    assert [row[0]["label"] for row in said["labels"]["logits"]] == [
        labels[place] for place in expected.argmax(1).tolist()
    ]
    assert said["outputs"][0]["shape"] == [2, 3]


def test_a_token_classifier_says_a_label_a_token(forward: Any, tmp_path: Path) -> None:
    config = kinds.bert(id2label={0: "O", 1: "B-PER", 2: "I-PER"})
    folder = kinds.save(tmp_path / "ner", config, "BertForTokenClassification", kinds.tokenizer())
    outputs, said = forward(f"model.path={folder}", "forward.texts=[a b weights]")
    expected = plain(folder, "BertForTokenClassification", kinds.tokenizer()("a b weights", return_tensors="pt")).logits
    equal({"logits": outputs["logits"]}, {"logits": expected})
    assert said["labels"]["logits"] == [[config.id2label[place] for place in expected[0].argmax(1).tolist()]]


@pytest.mark.parametrize("pooling", in_ci("last", of=["cls", "last"]))
def test_the_encoder_of_t5(forward: Any, tmp_path: Path, pooling: str) -> None:
    folder = kinds.save(tmp_path / "t5", kinds.t5(), "T5ForConditionalGeneration", kinds.tokenizer())
    given = {"input_ids": np.array([[5, 6, 7, 8], [9, 10, 0, 0]]), "attention_mask": np.array([[1] * 4, [1, 1, 0, 0]])}
    np.savez("in.npz", **given)
    outputs, _ = forward(f"model.path={folder}", "model.class=T5EncoderModel", "forward.inputs=in.npz",
                       f"forward.pooling={pooling}", "forward.outputs=[embeddings,last_hidden_state]")  # fmt: skip
    hidden = plain(folder, "T5EncoderModel", {k: torch.tensor(v) for k, v in given.items()}).last_hidden_state
    places = {"cls": [0, 0], "last": [3, 1]}[pooling]
    equal(outputs, {"last_hidden_state": hidden, "embeddings": hidden[[0, 1], places]})


def test_vit_classifies_images(forward: Any, tmp_path: Path) -> None:
    config = kinds.vit(id2label={0: "cat", 1: "dog", 2: "stage"})
    folder = kinds.save(tmp_path / "vit", config, "ViTForImageClassification", kinds.vit_processor())
    files = [kinds.save_image(tmp_path / f"{place}.png", seed=place) for place in range(3)]
    outputs, said = forward(f"model.path={folder}", f"forward.images={listed(files)}", "forward.batch_size=2")
    assert said["together"] == [[0, 1], [2]]
    processor = kinds.vit_processor()
    for rows in said["together"]:
        made = processor([Image.open(files[row]).convert("RGB") for row in rows], return_tensors="pt")
        assert torch.equal(outputs["logits"][rows], plain(folder, "ViTForImageClassification", made).logits)
    assert len(said["labels"]["logits"]) == 3


def test_clip_holds_images_against_texts(forward: Any, tmp_path: Path) -> None:
    folder = kinds.save(tmp_path / "clip", kinds.clip(), "CLIPModel", kinds.clip_processor())
    files = [kinds.save_image(tmp_path / f"{place}.png", seed=place) for place in range(2)]
    outputs, said = forward(
        f"model.path={folder}", f"forward.images={listed(files)}", "forward.texts=[a b,offstage,cue]"
    )
    made = transformers.AutoProcessor.from_pretrained(folder)(
        text=["a b", "offstage", "cue"], images=[Image.open(file) for file in files], return_tensors="pt", padding=True
    )
    made.pop("token_type_ids", None)
    expected = plain(folder, "CLIPModel", made)
    assert {"logits_per_image", "logits_per_text", "text_embeds", "image_embeds"} <= outputs.keys()
    equal({name: tensor for name, tensor in outputs.items() if name != "attention_mask"}, expected)
    assert (
        said["labels"]["logits_per_image"][1][0]["label"]
        == ["a b", "offstage", "cue"][int(expected.logits_per_image[1].argmax())]
    )


def test_wav2vec2_hears_sounds_of_unlike_length(forward: Any, tmp_path: Path) -> None:
    extractor = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    config = kinds.wav2vec2(feat_extract_norm="layer", do_stable_layer_norm=True)
    folder = kinds.save(tmp_path / "w2v", config, "Wav2Vec2Model", extractor)
    files = [kinds.save_sound(tmp_path / f"{count}.wav", count, seed=count) for count in (900, 1600)]
    outputs, _ = forward(f"model.path={folder}", f"forward.audio={listed(files)}", "forward.pooling=mean",
                       "forward.outputs=[last_hidden_state,embeddings]")  # fmt: skip
    sounds = []
    for file in files:
        with wave.open(str(file)) as sound:
            sounds.append(np.frombuffer(sound.readframes(10**6), "<i2").astype(np.float32) / 32768)
    made = extractor(sounds, sampling_rate=16000, padding=True, return_tensors="pt")
    model = transformers.Wav2Vec2Model.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = model(**made).last_hidden_state
    assert torch.equal(outputs["last_hidden_state"], hidden)
    mask = model._get_feature_vector_attention_mask(hidden.shape[1], made["attention_mask"]).float()[:, :, None]
    assert torch.equal(outputs["embeddings"], (hidden * mask).sum(1) / mask.sum(1))


def test_a_vision_language_model_reads_texts_beside_images(forward: Any, tmp_path: Path) -> None:
    folder = media.save(tmp_path / "llava", "llava")
    files = [media.picture(tmp_path / f"{place}.png", seed=place) for place in range(2)]
    texts = ["<image>what is it", "see <image>"]
    result, _ = forward(f"model.path={folder}", f"forward.images={listed(files)}", f"forward.texts={json.dumps(texts)}",
                       "forward.outputs=[logits]")  # fmt: skip
    processor = transformers.AutoProcessor.from_pretrained(folder)
    made = processor(images=[Image.open(file) for file in files], text=texts, return_tensors="pt", padding=True)
    expected = plain(folder, "LlavaForConditionalGeneration", made, use_cache=False).logits
    assert torch.equal(result["logits"], expected)


def test_whisper_hears_and_is_told_what_was_said(forward: Any, tmp_path: Path) -> None:
    folder = media.save(tmp_path / "whisper", "whisper")
    file = kinds.save_sound(tmp_path / "a.wav", 4000)
    said = {"decoder_input_ids": np.array([[3, 5, 7]])}
    np.savez("said.npz", **said)
    tensors, _ = forward(f"model.path={folder}", f"forward.audio=[{file}]", "forward.inputs=said.npz",
                       "forward.outputs=[logits,encoder_last_hidden_state]")  # fmt: skip
    with wave.open(str(file)) as sound:
        samples = np.frombuffer(sound.readframes(10**6), "<i2").astype(np.float32) / 32768
    made = transformers.AutoFeatureExtractor.from_pretrained(folder)(samples, sampling_rate=16000, return_tensors="pt")
    given = {**made, "decoder_input_ids": torch.tensor(said["decoder_input_ids"])}
    equal(tensors, plain(folder, "WhisperForConditionalGeneration", given, use_cache=False))


NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first = torch.nn.Linear(4, width)
        self.second = torch.nn.Linear(width, 3)

    def forward(self, left, right, scale=None):
        hidden = self.first(left) + right
        return {"logits": self.second(hidden), "parts": (hidden, hidden[:1])}
"""


def test_a_plain_module(offstage_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net_forward.py").write_text(NET)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.manual_seed(0)
    weights = {"first.weight": torch.randn(8, 4), "first.bias": torch.randn(8), "second.weight": torch.randn(3, 8)}
    save_file({**weights, "second.bias": torch.randn(3)}, tmp_path / "model.safetensors")
    given = {"left": torch.randn(5, 4), "right": torch.randn(5, 8)}
    save_file(given, tmp_path / "in.safetensors")
    module = ["stages=forward", "model=module", "model._target_=net_forward.Net", "model.path=.", *STREAMED]
    run = offstage_here(*module, "forward.inputs=in.safetensors", "forward.outputs=[logits,parts]")
    assert run.code == 0, run.err
    outputs = load_file(Path(run.record["stages"][-1]["artifact"]) / "outputs.safetensors")
    from net_forward import Net

    net = Net()
    net.load_state_dict(load_file(tmp_path / "model.safetensors"))
    with torch.no_grad():
        expected = net(**given)
    equal(outputs, {"logits": expected["logits"], "parts.0": expected["parts"][0], "parts.1": expected["parts"][1]})
    assert {one["name"] for one in run.record["outputs"]} == {"logits", "parts.0", "parts.1"}


def test_what_was_done_is_served_from_the_cache_and_replays(offstage_here: Run, replay: Replay, tmp_path: Path) -> None:
    folder = kinds.save(tmp_path / "bert", kinds.bert(), "BertModel", kinds.tokenizer())
    arguments = ["stages=forward", "model=pretrained", f"model.path={folder}", "forward.texts=[a b c]", *STREAMED]
    first, again = offstage_here(*arguments), offstage_here(*arguments)
    assert (first.code, again.code) == (0, 0), again.err
    assert all(again.cached.values())
    assert first.record["outputs"] == again.record["outputs"]
    assert "last_hidden_state  float32  1 x 5 x 32" in again.out
    (record, *_) = sorted((tmp_path / "outputs/runs").glob("*/*/run.json"))
    content = json.loads(record.read_text())
    content["outputs"][0]["sha256"] = "0" * 64
    record.write_text(json.dumps(content))
    code, out, err = replay(record)
    assert code == 1, (out, err)
    assert f"different; output 0, last_hidden_state sha256: was {'0' * 64}, is" in out


def save_unet(folder: Path, inputs: Path) -> dict[str, torch.Tensor]:
    """Save a small UNet of diffusers in ``folder``, and what its forward is given in a file; return the latter."""
    import diffusers

    unet = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip
    unet.save_pretrained(folder, max_shard_size="300KB")
    given = {
        "sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor(7), "encoder_hidden_states": torch.randn(2, 5, 16)
    }  # fmt: skip
    save_file(given, inputs)
    return given


def test_a_unet_of_diffusers(forward: Any, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    given = save_unet(tmp_path / "pipe/unet", tmp_path / "in.safetensors")
    outputs, _ = forward(f"model.path={tmp_path}/pipe/unet", "forward.inputs=in.safetensors", "max_memory.cpu=3MB")
    with torch.no_grad():
        expected = diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "pipe/unet").eval()(**given)
    assert outputs.keys() == {"sample"}
    equal(outputs, expected)


def test_a_transformer_of_diffusers(forward: Any, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    dit = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=3, sample_size=8, norm_num_groups=4
    )
    dit.save_pretrained(tmp_path / "dit")
    given = {
        "hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 9]), "class_labels": torch.tensor([1, 5])
    }  # fmt: skip
    save_file(given, tmp_path / "in.safetensors")
    outputs, _ = forward(f"model.path={tmp_path}/dit", "forward.inputs=in.safetensors", "max_memory.cpu=3MB")
    with torch.no_grad():
        equal(outputs, diffusers.DiTTransformer2DModel.from_pretrained(tmp_path / "dit").eval()(**given))


def test_another_image_in_the_same_place_is_another_forward(offstage_here: Run, tmp_path: Path) -> None:
    folder = kinds.save(tmp_path / "vit", kinds.vit(), "ViTForImageClassification", kinds.vit_processor())
    kinds.save_image(tmp_path / "a.png", seed=1)
    arguments = ["stages=forward", "model=pretrained", f"model.path={folder}", "forward.images=[a.png]", *STREAMED]
    first = offstage_here(*arguments)
    kinds.save_image(tmp_path / "a.png", seed=2)
    second = offstage_here(*arguments)
    assert (first.code, second.code) == (0, 0), second.err
    assert not second.cached["forward"]
    assert first.record["outputs"] != second.record["outputs"]
