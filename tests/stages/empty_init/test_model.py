"""Which class a checkpoint's model is of, and what is said where none can be told."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_heads_product_for_the_last_positions_of_a_batch_is_one_and_has_the_plain_models_bits(
    dtype: str, tmp_path: Path
) -> None:
    """Else torch makes one for each sequence, with a copy of the weight in bfloat16, and other bits in float32."""
    shape = {"hidden_size": 96, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    plain = LlamaForCausalLM._from_config(LlamaConfig(vocab_size=4099, **shape), dtype=getattr(torch, dtype)).eval()
    plain.save_pretrained(tmp_path)
    model = build_model({"kind": "pretrained", "path": str(tmp_path), "trust_remote_code": False}, dtype)
    model.load_state_dict(plain.state_dict(), assign=True)
    model.requires_grad_(False)
    prompts = torch.arange(4 * 7).reshape(4, 7)
    with torch.no_grad(), BatchedProducts() as batched:
        logits = model(prompts, logits_to_keep=1).logits
        assert not any(4099 in shape for shape in batched.shapes)
        assert torch.equal(logits, plain(prompts, logits_to_keep=1).logits)
        assert model.lm_head(torch.zeros(96)[None].to(logits.dtype)).shape == (1, 4099)


class BatchedProducts(TorchDispatchMode):
    """The shapes of the batched products that are made while it is entered; the angles of positions may be some."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bmm.default:
            self.shapes.append(result.shape)
        return result


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
