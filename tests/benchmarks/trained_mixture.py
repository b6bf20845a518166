"""A small mixture that learns in minutes, and which experts it routes the tokens to that it then makes.

Routers with random weights choose without rhyme or reason, so nothing could be said of keeping experts from them. This
is a Qwen3-MoE of 6 layers, 32 experts each, 4 a token, that learns to continue Python's own sources (code, comments and
documentation, which are there on every machine), with the usual loss that balances the load of the experts. Then it
continues files that it hasn't seen, drawing its tokens, and hooks write down what each layer's experts are called for.
"""

from __future__ import annotations

import math
import random
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from offstage.stages.dispatch.experts.eviction import Expert
from tests.benchmarks.routing import Pass, RoutingTrace

TOKENIZER = Path(__file__).parents[2] / "conf/checkpoints/tiny/tokenizer.json"
LAYERS, EXPERTS, CHOSEN = 6, 32, 4
BALANCE = 0.01
"""What the balancing loss is multiplied by: OLMoE's figure."""
SPREAD = 0.08
"""Of the first weights: with this width the routers' logits are spread as those of 2048 are with the usual 0.02."""
HELD_OUT = 20
"""One file in so many isn't learnt from."""
CONTEXT, ROWS, RATE = 128, 8, 3e-3
PROMPT = 32


@dataclass(frozen=True, slots=True)
class Learnt:
    """A mixture, texts that it hasn't learnt from, how many steps it learnt, and its last loss in nats a token."""

    model: Qwen3MoeForCausalLM
    held_out: list[torch.Tensor]
    steps: int
    loss: float


def sources() -> list[str]:
    """Return the texts of the standard library's modules, in an order that mixes them."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(0).shuffle(files)
    return [file.read_text(encoding="utf-8", errors="ignore") for file in files]


def learn(minutes: float, most_steps: int | None = None, say: Callable[[str], None] = lambda line: None) -> Learnt:
    """Return a mixture that has learnt for ``minutes``, or ``most_steps`` steps where that is given."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    texts = sources()
    if most_steps is not None:
        texts = texts[: 2 * HELD_OUT]
    tokens = [torch.tensor(tokenizer.encode(text).ids) for text in texts]
    held_out = [ids for ids in tokens[::HELD_OUT] if len(ids) > PROMPT]
    stream = torch.cat([ids for number, ids in enumerate(tokens) if number % HELD_OUT])
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(_config(tokenizer.get_vocab_size()))
    steps, loss = _train(model, stream, minutes, most_steps, say)
    return Learnt(model.eval(), held_out, steps, loss)


def _config(vocabulary: int) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=128, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=256, moe_intermediate_size=64, num_experts=EXPERTS, num_experts_per_tok=CHOSEN,
        norm_topk_prob=True, router_aux_loss_coef=BALANCE, output_router_logits=True, tie_word_embeddings=True,
        max_position_embeddings=4096, initializer_range=SPREAD, bos_token_id=0, eos_token_id=None, pad_token_id=2,
    )  # fmt: skip


def _train(
    model: Qwen3MoeForCausalLM, stream: torch.Tensor, minutes: float, most_steps: int | None, say: Callable[[str], None]
) -> tuple[int, float]:
    """Train ``model`` in place on rows of ``stream``; return the steps and the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    drawn = torch.Generator().manual_seed(1)
    began = time.monotonic()
    step, loss, done = 0, math.nan, 0.0
    while done < 1:
        starts = torch.randint(len(stream) - CONTEXT, (ROWS,), generator=drawn)
        rows = torch.stack([stream[start : start + CONTEXT] for start in starts.tolist()])
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * done))
        out = model(input_ids=rows, labels=rows)
        optimizer.zero_grad()
        out.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        loss = float(out.loss.detach() - BALANCE * out.aux_loss.detach())
        if step % 50 == 0:
            say(f"step {step}: {loss:.3f} nats a token, balance {float(out.aux_loss.detach()):.2f} ({CHOSEN} is even)")
        done = step / most_steps if most_steps else (time.monotonic() - began) / 60 / minutes
    return step, loss


def record(learnt: Learnt, texts: int, tokens: int) -> RoutingTrace:
    """Return where the tokens of ``texts`` continuations are routed, each of ``tokens`` tokens, after their prompts."""
    passes: list[Pass] = []
    torch.manual_seed(2)
    with recording(learnt.model, passes), torch.no_grad():
        for number in range(texts):
            ids = learnt.held_out[number % len(learnt.held_out)]
            start = random.Random(number).randrange(len(ids) - PROMPT)
            prompt = ids[None, start : start + PROMPT]
            learnt.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=True, top_k=0
            )
    return RoutingTrace("recorded", LAYERS, EXPERTS, tuple(passes))


@contextmanager
def recording(model: nn.Module, passes: list[Pass]) -> Iterator[None]:
    """Append to ``passes`` what each forward of ``model`` calls its experts modules for."""
    experts: list[Expert] = []
    layers = [module for name, module in model.named_modules() if name.endswith(".experts")]

    def note(layer: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            experts.extend((layer, int(expert)) for expert in arguments[1].unique())

        return hook

    def end(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: object) -> None:
        passes.append(Pass(tuple(experts), keywords["input_ids"].numel()))
        experts.clear()

    hooks = [module.register_forward_pre_hook(note(layer)) for layer, module in enumerate(layers)]
    hooks.append(model.register_forward_hook(end, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
