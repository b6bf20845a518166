"""A mixture of remote code, as such code was written before transformers had an interface for experts."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.e2e.conftest import Finished

LAYERS, EXPERTS, TOP, WIDTH, INNER, WORDS = 3, 16, 2, 128, 256, 256
PROMPT, TOKENS = list(range(1, 41)), 8
ROUTED = LAYERS * (TOP + 1) * 3 * WIDTH * INNER
"""The elements of the experts that a token is routed to, and of the shared ones."""
DENSE = LAYERS * (3 * WIDTH * WIDTH + EXPERTS * WIDTH + 2 * WIDTH) + WIDTH + WIDTH * WORDS
"""Those of attention, routers, norms and the head."""
CODE = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


class ListedConfig(LlamaConfig):
    model_type = "listed"


class Expert(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Mixture(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.n_routed_experts, bias=False)
        self.experts = nn.ModuleList(
            Expert(config.hidden_size, config.intermediate_size) for _ in range(config.n_routed_experts)
        )
        self.shared_experts = Expert(config.hidden_size, config.intermediate_size)

    def forward(self, hidden):
        flat = hidden.view(-1, hidden.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(self.top)
        counts = chosen.new_zeros((len(chosen), len(self.experts)))
        counts.scatter_(1, chosen, 1)
        order = chosen.view(-1).argsort(stable=True)
        ordered, outputs, start = flat[order // self.top], [], 0
        for index, count in enumerate(counts.sum(0).cpu().numpy()):
            if count == 0:
                continue
            outputs.append(self.experts[index](ordered[start : start + count]))
            start += count
        mixed = torch.cat(outputs)
        placed = torch.empty_like(mixed)
        placed[order] = mixed
        out = (placed.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)
        return (out + self.shared_experts(flat)).view(hidden.shape)


class ListedForCausalLM(LlamaForCausalLM):
    config_class = ListedConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Mixture(config)
        self.post_init()
"""


def imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("modeling_listed", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["modeling_listed"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Save a mixture with its code; return the folder, and what the plain model answers."""
    folder = tmp_path_factory.mktemp("listed")
    (folder / "modeling_listed.py").write_text(CODE)
    code = imported(folder / "modeling_listed.py")
    config = code.ListedConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=WORDS, n_routed_experts=EXPERTS, num_experts_per_tok=TOP,
        initializer_range=0.3, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = code.ListedForCausalLM(config).eval()
    model.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    saved["auto_map"] = {
        "AutoConfig": "modeling_listed.ListedConfig",
        "AutoModelForCausalLM": "modeling_listed.ListedForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(saved))
    prompt = torch.tensor([PROMPT])
    answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS, do_sample=False)
    return folder, answer[0, len(PROMPT) :].tolist()


@pytest.mark.long_form
@pytest.mark.of_the_process("what it holds is measured, and a fork shares memory with its server")
def test_a_token_reads_the_experts_of_remote_code_that_it_is_routed_to(
    checkpoint: tuple[Path, list[int]],
    offstage: Callable[..., Finished],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, answer = checkpoint
    done = offstage(
        f"model.path={folder}", "model.trust_remote_code=true", "max_memory.cpu=2MB", "storage.io=direct",
        f"generate.prompts=[{PROMPT}]", f"generate.max_new_tokens={TOKENS}",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.tokens == [answer]
    assert f"{LAYERS * EXPERTS} experts read when tokens are routed to them" in done.out
    metrics, memory = done.record["metrics"], done.record["memory"]
    assert metrics["streamed_bytes_per_token"] == metrics["predicted_streamed_bytes_per_token"]
    assert metrics["streamed_bytes_per_token"] <= (ROUTED + DENSE) * 4
    prefill = (LAYERS * EXPERTS * 3 * WIDTH * INNER + DENSE) * 4
    assert metrics["storage_read_bytes"] < 1.1 * (prefill + TOKENS * (ROUTED + DENSE) * 4), "and nothing ahead of it"
    assert memory["measured"]["cpu"] < 1.1 * memory["predicted"]["cpu"]
