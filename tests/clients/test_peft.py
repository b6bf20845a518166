"""Adapters of peft on a model that streams, whichever function loaded it: to the bit what they are on a plain one."""

from pathlib import Path
from typing import Any

import pytest
import torch

import offstage
from tests.clients.doors import DOORS, Door, losses_of, make_llama, plain

peft = pytest.importorskip("peft")

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])
ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {},
    "dora": {"use_dora": True},
    "lm_head": {"target_modules": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens"]},
    "saved_lm_head": {"modules_to_save": ["lm_head"]},
    "saved_embedding": {"modules_to_save": ["embed_tokens"]},
    "saved_norms": {"modules_to_save": ["norm"]},
    "tokens": {"trainable_token_indices": [1, 3]},
    "parameters": {"target_modules": [], "target_parameters": ["mlp.gate_proj.weight"]},
}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peft") / "llama"
    return make_llama(folder, tie_word_embeddings=request.param, attention_bias=True)


def adapted(model: Any, options: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, **{"target_modules": ["q_proj"], **options}))


def trained(model: Any) -> tuple[list[float], torch.Tensor]:
    """Return the losses of three steps, and what the model answers after them."""
    optimiser = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    return losses_of(model, optimiser, TOKENS), model(TOKENS).logits.detach()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
def test_adapters_are_trained_saved_and_loaded_as_on_the_plain_model(options: Any, checkpoint, tmp_path) -> None:
    model = adapted(plain(checkpoint), options)
    losses, logits = trained(model)
    model.save_pretrained(tmp_path / "plain")
    saved = peft.utils.load_peft_weights(str(tmp_path / "plain"))
    for door in DOORS:
        model = adapted(door(checkpoint), options)
        own_losses, own_logits = trained(model)
        assert own_losses == losses, door
        assert torch.equal(own_logits, logits), door
        model.save_pretrained(tmp_path / door.__name__)
        own = peft.utils.load_peft_weights(str(tmp_path / door.__name__))
        assert own.keys() == saved.keys(), door
        assert all(torch.equal(own[name], value) for name, value in saved.items()), door
        loaded = peft.PeftModel.from_pretrained(door(checkpoint), tmp_path / "plain")
        assert torch.equal(loaded(TOKENS).logits, logits), door


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", DOORS)
def test_what_would_change_the_weights_that_stream_is_refused(door: Door, checkpoint: Path) -> None:
    with pytest.raises(RuntimeError, match=r"q_proj.weight' is offloaded, and data set in its place would be lost"):
        adapted(door(checkpoint), {"init_lora_weights": "pissa"})
    for biases in ("all", "lora_only"):
        with pytest.raises(RuntimeError, match=r"_proj.bias' streams, and what streams can't learn; take bias='none'"):
            adapted(door(checkpoint), {"bias": biases})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("biases", ["all", "lora_only"])
def test_biases_that_are_kept_in_memory_learn_with_an_adapter(biases: str, checkpoint: Path) -> None:
    kept = {f"model.layers.{n}.self_attn.{name}_proj.bias": "cpu" for n in range(2) for name in "qkvo"}
    cache = checkpoint.with_name("cache")
    options: dict[str, Any] = {"device_map": {"": "disk"}, "device_map_overrides": kept, "max_length": 64}
    with offstage.load(checkpoint, cache=cache, **options) as loaded:
        losses, logits = trained(adapted(loaded.model, {"bias": biases}))
    expected, expected_logits = trained(adapted(plain(checkpoint), {"bias": biases}))
    assert losses == expected
    assert torch.equal(logits, expected_logits)
