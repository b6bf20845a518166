"""What a model is, told from its small files and its code; and what dtype ``auto`` comes to."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offstage.pipeline.cache.fingerprint import fingerprint
from offstage.pipeline.errors import CheckpointError
from offstage.stages.empty_init.identity import identity, quantization_fault, resolve_dtype
from offstage.stages.empty_init.stage import EmptyInitStage


def resolved(folder: Path, dtype: str = "auto") -> str:
    return resolve_dtype({"dtype": dtype, "model": {"kind": "pretrained", "path": str(folder)}})


@pytest.mark.parametrize(
    ("config", "dtype"),
    [({"dtype": "bfloat16"}, "bfloat16"), ({"text_config": {"torch_dtype": "torch.float16"}}, "float16")],
)
def test_what_the_config_declares_counts_first(tmp_path: Path, config: dict[str, object], dtype: str) -> None:
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(2, dtype=torch.float64)}, tmp_path / "model.safetensors")
    assert resolved(tmp_path) == dtype
    assert resolved(tmp_path, "float32") == "float32"


def test_else_the_first_floating_tensor_of_the_checkpoints_own_file_tells(tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_text("{}")
    save_file({"a": torch.zeros(2, dtype=torch.float64)}, tmp_path / "a_file_of_something_else.safetensors")
    tensors = {"a": torch.zeros(2, dtype=torch.int64), "b": torch.zeros(2, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert resolved(tmp_path) == "bfloat16"


def test_a_checkpoint_that_tells_nothing_is_float32(tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_text("{}")
    assert resolved(tmp_path) == "float32"
    tmp_path.joinpath("model.safetensors").write_bytes(b"damaged")
    assert resolved(tmp_path) == "float32"


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def pretrained(folder: Path, **changes: object) -> dict[str, object]:
    node = {"kind": "pretrained", "path": str(folder), "class": None, "no_split": None, "trust_remote_code": False}
    return {**node, **changes}


def module(**arguments: object) -> dict[str, object]:
    return {"kind": "module", "path": "/x", "no_split": None, "_target_": "torch.nn.Linear", **arguments}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (module(a=1), module(a=2)),
        (module(a=1), module(a=1.0)),
        (module(a=1), module(a="1")),
        (module(a={"x": 1, "y": 2}), module(a={"y": 2, "x": 1})),
        (module(a=1, b=2), module(b=2, a=1)),
        (module(a=1), module(a=1, b=None)),
    ],
)
def test_other_arguments_make_another_model(one: dict[str, object], other: dict[str, object]) -> None:
    assert fingerprint(identity(one)) != fingerprint(identity(other))


def test_code_that_an_argument_names_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("layers_b.py").write_text("x = 1\n")
    node = module(parts=[{"_target_": "layers_b.Layer"}])
    before = identity(node)
    tmp_path.joinpath("layers_b.py").write_text("x = 2\n")
    assert identity(node) != before


def test_the_code_of_a_class_of_ones_own_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("config.json").write_text(json.dumps(LLAMA))
    tmp_path.joinpath("classes_b.py").write_text("x = 1\n")
    node = pretrained(tmp_path, **{"class": "classes_b.Llama"})
    before = identity(node)
    tmp_path.joinpath("classes_b.py").write_text("x = 2\n")
    assert identity(node) != before


@pytest.mark.parametrize("name", ["modeling_b.py", "parts/layer_b.py", "../other/remote_b.py", "../path/local_b.py"])
def test_trusted_code_counts_wherever_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = tmp_path / "checkpoint"
    files = {
        "config.json": json.dumps({**LLAMA, "auto_map": {"AutoConfig": "other--remote_b.Config"}}),
        "modeling_b.py": "from .parts.layer_b import x\nimport local_b\n", "parts/layer_b.py": "x = 1\n",
        "../other/remote_b.py": "x = 1\n", "../path/local_b.py": "x = 1\n",
    }  # fmt: skip
    for file, text in files.items():
        folder.joinpath(file).parent.mkdir(parents=True, exist_ok=True)
        folder.joinpath(file).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    trusted, distrusted = pretrained(folder, trust_remote_code=True), pretrained(folder)
    before = identity(trusted), identity(distrusted)
    folder.joinpath(name).write_text(files[name] + "y = 2\n")
    assert identity(trusted) != before[0]
    assert identity(distrusted) == before[1]


QUANTISED = {
    "hqq": {"quantization_config": {"quant_method": "hqq", "bits": 4}},
    "bitsandbytes": {"text_config": {"quantization_config": {"quant_method": "bitsandbytes"}}},
    "fp8": {"vision_config": {"quantization_config": {"quant_method": "fp8"}}},
    "compressed-tensors": {"compression_config": {"quant_method": "compressed-tensors"}},
    "none is named": {"quantization_config": {"bits": 4}},
}


@pytest.mark.parametrize("method", QUANTISED)
def test_a_quantised_checkpoint_is_refused_by_its_method(tmp_path: Path, method: str) -> None:
    tmp_path.joinpath("config.json").write_text(json.dumps({**LLAMA, **QUANTISED[method]}))
    faults = list(EmptyInitStage().check({"model": pretrained(tmp_path)}))
    assert [(fault.key, fault.error) for fault in faults] == [("model.path", CheckpointError)]
    assert repr(method) in str(faults[0])
    with pytest.raises(CheckpointError, match=f"quantised weights .*{method}"):
        identity(pretrained(tmp_path))


@pytest.mark.parametrize("method", ["fp8", "mxfp8", "mxfp4"])
def test_a_checkpoint_quantised_by_a_method_that_is_served_is_no_fault(tmp_path: Path, method: str) -> None:
    quantised = {"quantization_config": {"quant_method": method}}
    for config in (quantised, {"text_config": quantised}):
        tmp_path.joinpath("config.json").write_text(json.dumps({**LLAMA, **config}))
        assert quantization_fault(tmp_path) is None


def test_who_gives_what_is_not_served_is_told_what_would_work(tmp_path: Path) -> None:
    for method, words in {"hqq": "or one quantised by a method that is", "bitsandbytes": "call dequantize()"}.items():
        tmp_path.joinpath("config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
        assert words in str(quantization_fault(tmp_path))


def test_a_config_that_declares_nothing_quantised_is_no_fault(tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_text(json.dumps({**LLAMA, "quantization_config": None}))
    assert list(EmptyInitStage().check({"model": pretrained(tmp_path)})) == []
