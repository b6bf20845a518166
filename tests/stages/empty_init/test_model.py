"""Which class a checkpoint's model is of, and what is said where none can be told."""

import re
from pathlib import Path

import pytest
from transformers import LlamaConfig

from offstage.pipeline.errors import CheckpointError, ConfigError, OffstageError
from offstage.stages.empty_init.model import build_model

SMALL = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)


def node(folder: Path, architecture: str | None, override: str | None) -> dict[str, object]:
    config = LlamaConfig(**{**SMALL.to_dict(), "architectures": [architecture] if architecture else None})
    config.save_pretrained(folder)
    return {"kind": "pretrained", "path": str(folder), "class": override, "trust_remote_code": False}


@pytest.mark.parametrize(
    ("architecture", "override", "expected"),
    [
        ("LlamaForCausalLM", None, "LlamaForCausalLM"),
        ("AutoModel", None, "LlamaModel"),
        ("AutoModelForCausalLM", None, "LlamaForCausalLM"),
        (None, None, "LlamaForCausalLM"),
        ("LlamaForCausalLM", "AutoModel", "LlamaModel"),
        ("Nonsense", "LlamaModel", "LlamaModel"),
    ],
)
def test_the_class_is_the_one_that_is_named(
    architecture: str | None, override: str | None, expected: str, tmp_path: Path
) -> None:
    assert type(build_model(node(tmp_path, architecture, override), "float32")).__name__ == expected


WRONG = [
    "AutoModelForSeq2SeqLM", "AutoModelForImageClassification", "AutoConfig", "AutoTokenizer", "LlamaConfig",
    "LlamaForCausalLn", "LlamaModell", "pipeline", "AutoModell", "x",
]  # fmt: skip


@pytest.mark.parametrize("named", WRONG)
@pytest.mark.parametrize("overridden", [True, False])
def test_a_name_that_is_no_class_of_this_model_is_refused_and_none_is_proposed_for_itself(
    named: str, overridden: bool, tmp_path: Path
) -> None:
    given = node(tmp_path, "LlamaForCausalLM", named) if overridden else node(tmp_path, named, None)
    with pytest.raises(OffstageError) as raised:
        build_model(given, "float32")
    assert isinstance(raised.value, ConfigError if overridden else CheckpointError)
    text = str(raised.value)
    assert f"{named!r} is no class of transformers" in text
    assert "model.class" in text
    assert f"did you mean {named!r}" not in text
    proposed = re.search(r"did you mean '(\w+)'", text)
    if proposed is not None:  # and what is proposed would do
        build_model(node(tmp_path, "LlamaForCausalLM", proposed[1]), "float32")
