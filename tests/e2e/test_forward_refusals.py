"""stages=forward: what can't be called is said in one line, with exit code 2, before a weight is read."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.e2e import checkpoints_of_kinds as kinds
from tests.e2e.conftest import Finished
from tests.long_form import in_part

Run = Callable[..., Finished]

EIGHT = np.arange(8).reshape(1, 8)
SAVED = {
    "stranger.npz": {"pixel_values": np.zeros((1, 3, 16, 16), np.float32)},
    "misspelt.npz": {"input_idz": EIGHT},
    "wide.npz": {"inputs_embeds": np.zeros((1, 4, 31), np.float32)},
    "ragged.npz": {"input_ids": EIGHT, "attention_mask": np.ones((1, 5), np.int64)},
    "beyond.npz": {"input_ids": EIGHT + 1000},
    "floats.npz": {"input_ids": EIGHT.astype(np.float32)},
    "uneven.npz": {"input_ids": EIGHT, "position_ids": np.zeros((3, 8), np.int64)},
    "objects.npz": {"input_ids": np.array([{}], dtype=object)},
    "mask.npz": {"attention_mask": np.ones((1, 5), np.int64)},
}
BERT = {
    "nothing is given": ([], "forward: nothing is given to the model; give one of forward.inputs, forward.texts"),
    "a key that isn't one": (["forward.text=[a]"], "forward.text: unknown key (did you mean 'texts'?)"),
    "a name of another model": (["forward.inputs=stranger.npz"], "BertModel's forward takes no 'pixel_values'"),
    "a misspelt name": (["forward.inputs=misspelt.npz"], "takes no 'input_idz' (did you mean 'input_ids'?)"),
    "another width": (
        ["forward.inputs=wide.npz"],
        "forward.inputs: BertModel's forward can't be called with these inputs",
    ),
    "two lengths": (
        ["forward.inputs=ragged.npz"],
        "forward.inputs: BertModel's forward can't be called with these inputs",
    ),
    "ids beyond the vocabulary": (["forward.inputs=beyond.npz"], "token id 1000 is none of the model's 34 words"),
    "floats for ids": (["forward.inputs=floats.npz"], "forward.inputs: BertModel's forward can't be called"),
    "batches of unlike rows": (
        ["forward.inputs=uneven.npz", "forward.batch_size=1"],
        "forward.batch_size: 'input_ids' has shape (1, 8)",
    ),
    "pickled objects": (["forward.inputs=objects.npz"], "has dtype object, which is none of numbers"),
    "an empty file of tensors": (["forward.inputs=empty.npz"], "is no .npz of plain arrays"),
    "an empty safetensors": (["forward.inputs=empty.safetensors"], "an empty file"),
    "another format": (["forward.inputs=empty.pt"], "is no .safetensors or .npz file"),
    "no file": (["forward.inputs=none.npz"], "can't be read: No such file or directory"),
    "an empty text": (["forward.texts=['']"], "forward.texts[0]: '' is no text"),
    "three texts together": (["forward.texts=[[a,b,c]]"], "is no text in UTF-8; give text, or a pair"),
    "pairs among texts": (
        ["forward.texts=[a,[b,c]]"],
        "forward.texts[1]: ('b', 'c') stands among texts of the other kind",
    ),
    "a text beyond the context": (
        [f"forward.texts=[{' '.join('a' * 40)}]"],
        "forward.texts[0]: 42 tokens are more than the model's context of 24",
    ),
    "broken JSON": (["forward.texts_file=broken.jsonl"], "forward.texts_file line 2: '{' is no JSON"),
    "not UTF-8": (["forward.texts_file=latin.txt"], "isn't UTF-8"),
    "a file without texts": (["forward.texts_file=blank.txt"], "holds no text; write one a line"),
    "texts twice": (
        ["forward.texts=[a]", "forward.texts_file=broken.jsonl"],
        "forward.texts_file: texts are given too",
    ),
    "an image for a text model": (["forward.images=[a.png]"], "holds no image processor that loads"),
    "no such output": (
        ["forward.texts=[a]", "forward.outputs=[logits]"],
        "BertModel returns no 'logits'; it returns last_hidden_state",
    ),
    "an unknown pooling": (
        ["forward.texts=[a]", "forward.pooling=max"],
        "forward.pooling: 'max' is none of mean, cls, last",
    ),
    "nothing to normalise": (["forward.texts=[a]", "forward.normalize=true"], "forward.normalize: there is no vector"),
    "no batch size": (
        ["forward.texts=[a]", "forward.batch_size=0"],
        "batch_size: 0 is no whole number from 1 or null",
    ),
    "what it makes itself, given twice": (
        ["forward.texts=[a]", "forward.inputs=mask.npz"],
        "'attention_mask' is made of forward.texts too",
    ),
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    kinds.save(folder, kinds.bert(), "BertModel", kinds.tokenizer())
    for name, arrays in SAVED.items():
        np.savez(folder / name, **arrays)
    for name in ("empty.npz", "empty.safetensors", "empty.pt"):
        (folder / name).touch()
    (folder / "broken.jsonl").write_text('"a"\n{\n')
    (folder / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (folder / "blank.txt").write_text("\n \n")
    kinds.save_image(folder / "a.png")
    return folder


def refused(run: Finished, words: str) -> None:
    assert run.code == 2, (run.code, run.err)
    assert words in run.err, run.err
    assert run.err.strip().count("\n") == 0, run.err
    assert not any(stage["name"] == "shard_load" for record in run.records for stage in record["stages"])


@pytest.mark.parametrize("case", in_part(BERT))
def test_what_bert_cannot_be_called_with(case: str, bert: Path, offstage_here: Run, tmp_path: Path) -> None:
    given, words = BERT[case]
    placed = [one.replace("=", f"={bert}/", 1) if one.startswith(("forward.inputs", "forward.texts_file")) else one
              for one in given]  # fmt: skip
    placed = [one.replace("[a.png]", f"[{bert}/a.png]") for one in placed]
    refused(offstage_here("stages=forward", "model=pretrained", f"model.path={bert}", *placed), words)


def test_bad_media_are_named(offstage_here: Run, tmp_path: Path) -> None:
    vit = kinds.save(tmp_path / "vit", kinds.vit(), "ViTForImageClassification", kinds.vit_processor())
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "empty.png").touch()
    kinds.save_image(tmp_path / "good.png")
    forward = ["stages=forward", "model=pretrained", f"model.path={vit}"]
    refused(offstage_here(*forward, "forward.images=[good.png,text.png]"), "forward.images[1]: ")
    refused(offstage_here(*forward, "forward.images=[empty.png]"), "is an empty file")
    refused(offstage_here(*forward, "forward.images=[good.png]", "forward.pooling=cls"),
            "forward.pooling: ViTForImageClassification returns no last_hidden_state")  # fmt: skip
    refused(offstage_here(*forward, "forward.texts=[a cat]"), "'a cat' is text and the checkpoint has no tokenizer")
    extractor = transformers.Wav2Vec2FeatureExtractor()
    heard = kinds.save(tmp_path / "w2v", kinds.wav2vec2(), "Wav2Vec2ForCTC", extractor)
    (tmp_path / "text.wav").write_text("no audio")
    kinds.save_sound(tmp_path / "fast.wav", 900, rate=44100)
    forward[-1] = f"model.path={heard}"
    refused(offstage_here(*forward, "forward.audio=[fast.wav]"), "has 44100 Hz and the model takes 16000")
    run = offstage_here(*forward, "forward.audio=[text.wav]")
    refused(run, "forward.audio[0]: ")


def test_an_encoder_decoder_says_what_else_it_needs(offstage_here: Run, tmp_path: Path) -> None:
    t5 = kinds.save(tmp_path / "t5", kinds.t5(), "T5ForConditionalGeneration", kinds.tokenizer())
    run = offstage_here("stages=forward", "model=pretrained", f"model.path={t5}", "forward.texts=[a b]")
    refused(run, "give decoder_input_ids too, in the file of forward.inputs, or set model.class to its encoder")


def write_net(folder: Path, name: str) -> str:
    """Write the module ``name``, with a Net whose forward takes two tensors, and its weights; return the folder."""
    (folder / f"{name}.py").write_text(
        "import torch\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.only = torch.nn.Linear(4, 2)\n\n    def forward(self, left, right):\n"
        "        return self.only(left) + right\n"
    )
    save_file({"only.weight": torch.randn(2, 4), "only.bias": torch.randn(2)}, folder / "model.safetensors")
    return str(folder)


def test_a_module_that_needs_more_says_what(
    offstage_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(write_net(tmp_path, "net_refusing"))
    save_file({"left": torch.randn(3, 4)}, tmp_path / "in.safetensors")
    run = offstage_here("stages=forward", "model=module", "model._target_=net_refusing.Net", "model.path=.",
                        "forward.inputs=in.safetensors")  # fmt: skip
    refused(run, "Net's forward needs 'right' too")


def test_a_pipeline_of_diffusers_names_its_models_and_what_to_install(offstage_here: Run, tmp_path: Path) -> None:
    (tmp_path / "pipe/unet").mkdir(parents=True)
    (tmp_path / "pipe/unet/config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    (tmp_path / "pipe/model_index.json").write_text(
        '{"_class_name": "X", "unet": ["diffusers", "UNet2DConditionModel"]}'
    )
    save_file({"w": torch.zeros(1)}, tmp_path / "pipe/unet/diffusion_pytorch_model.safetensors")
    np.savez(tmp_path / "in.npz", sample=np.zeros((1, 4, 8, 8), np.float32))
    forward = ["stages=forward", "model=pretrained", "forward.inputs=in.npz"]
    whole = "is a pipeline of diffusers, made of several models; give the folder of one: "
    refused(offstage_here(*forward, "model.path=pipe"), f"{whole}{tmp_path}/pipe/unet")
    if importlib.util.find_spec("diffusers") is None:
        refused(offstage_here(*forward, "model.path=pipe/unet"), "pip install 'offstage-pipeline[diffusers]'")


def test_generate_says_where_a_model_belongs_that_takes_more_than_tokens(
    offstage_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(write_net(tmp_path, "net_deaf"))
    run = offstage_here("model=module", "model._target_=net_deaf.Net", "model.path=.", "generate.prompts=[[1,2]]")
    assert run.code == 2, run.err
    assert "generate: Net has no generate() of transformers, and fails on token ids alone: TypeError" in run.err
    assert "stages=forward calls any model with inputs of its own" in run.err
