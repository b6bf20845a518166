"""Which models can be trained on a text, told by their config and class alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import BertConfig, LlamaConfig, PretrainedConfig, T5Config, WhisperConfig

from offstage.stages.finetune.served import check_served
from offstage.stages.inputs.finetune_options import FinetuneOptions, LoraOptions

REFUSED = [
    (T5Config(architectures=["T5ForConditionalGeneration"]), "has an encoder, which a text says nothing of"),
    (WhisperConfig(architectures=["WhisperForConditionalGeneration"]), "has an encoder"),
    (BertConfig(architectures=["BertForMaskedLM"]), "has no labels of the token that comes next"),
    (BertConfig(architectures=["BertLMHeadModel"], is_decoder=False), "sees what comes after a token"),
    (LlamaConfig(architectures=["LlamaForSequenceClassification"]), "has no labels of the token that comes next"),
]


@pytest.mark.parametrize(("config", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_model_that_foretells_no_text_is_refused(config: PretrainedConfig, words: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    (fault,) = check_served(FinetuneOptions(), {"kind": "pretrained", "path": str(tmp_path)})
    assert fault.key == "model.class"
    assert words in fault.message


def test_one_adapter_is_trained_at_a_time_and_a_module_says_nothing_of_its_loss(tmp_path: Path) -> None:
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    options = FinetuneOptions(lora=LoraOptions())
    both = check_served(options, {"kind": "pretrained", "path": str(tmp_path), "adapter": "adapter"})
    said = [fault.message for fault in both if "peft isn't installed" not in fault.message]
    assert ["model.adapter is given too" in message for message in said] == [True]
    (fault,) = check_served(options, {"kind": "module"})
    assert fault.key == "model.kind"
