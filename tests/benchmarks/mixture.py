"""A mixture of experts under hard memory caps: offstage against transformers + accelerate and AirLLM, in turn.

    python -m tests.benchmarks.mixture --rounds 3 --airllm /tmp/airllm/bin/python
    python -m tests.benchmarks.mixture --gigabytes 1 --caps 1GiB --rounds 1 --tokens 2

Makes a Qwen3-MoE checkpoint with random weights in bfloat16, of about ``--gigabytes``: layers as those of
Qwen3-30B-A3B, 128 experts of which a token uses 8, stored expert by expert as that is, and as many layers as fit
(narrower ones where fewer than 6 would). It is written tensor by tensor, and kept in ``--folder``.

Rounds, sides and caps are those of ``tests.benchmarks.offload``, whose needs it shares; accelerate gets three budgets
for each cap. AirLLM 4.0.0 converts the checkpoint and then fails: it takes an expert for a module of its own. The raw
figure is of direct reads in random places, each as large as one tensor of an expert. Routers that haven't learnt choose
any expert alike, which is the worst case for keeping some.

The table in the end has, by cap, the medians: seconds a token, the bytes that offstage streamed for one, the share of
the wanted experts that were kept, and what both are to the least that has to be read, which is the bytes of the experts
that a token is routed to less those that were kept; how often accelerate at its best takes as long, and AirLLM. Where
a version of offstage streams all experts, no share is known, and the least is that of a run that keeps nothing.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from offstage.stages.empty_init import init_empty_weights
from offstage.stages.units import format_bytes, parse_size
from tests.benchmarks import airllm
from tests.benchmarks.checkpoints import INDEX, SPREAD, write_shards
from tests.benchmarks.offload import OURS, keep, run_round, say, summarise
from tests.benchmarks.sides import Setting, Side, accelerate_side, airllm_side, offstage_side
from tests.benchmarks.storage import random_read_bandwidth

EXPERTS, CHOSEN, VOCABULARY = 128, 8, 32_000
WIDTHS, FEWEST_LAYERS = (2048, 1024, 512), 6
BUDGET_SHARES = (0.4, 0.5, 0.6)
"""Of the cap: accelerate's host budgets. The process itself and a layer on its way need the rest."""
OTHERS = ("accelerate", "AirLLM")
RULER = "cap       s a token  streamed a token  hit rate  of the least  accelerate  AirLLM"

Rounds = list[dict[str, Any]]


def main() -> None:
    """Run the rounds under each cap and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8.0, help="about how large the checkpoint is")
    parser.add_argument("--caps", nargs="+", default=["2GiB", "3GiB", "4GiB"], help="the hard memory caps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--budgets", nargs="*", help="accelerate's host budgets; else 0.4, 0.5 and 0.6 of the cap")
    parser.add_argument("--airllm", metavar="PYTHON", help="the interpreter of an environment with AirLLM")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that a side may take")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench"))
    parser.add_argument("--option", action="append", default=[], help="an override for offstage")
    parser.add_argument("--remove", action="store_true", help="remove the checkpoint afterwards")
    parser.add_argument("--plot", type=Path, help="a .png to draw seconds and hit rates against caps into")
    arguments = parser.parse_args()
    config = mixture_config(arguments.gigabytes * 1e9)
    checkpoint = make_mixture(config, arguments.folder / f"mixture-{arguments.gigabytes:g}gb")
    work = arguments.folder / "work"
    work.mkdir(exist_ok=True)
    try:
        by_cap = measure(config, checkpoint, work, arguments)
        for cap, rounds in by_cap.items():
            say(f"under {cap}:")
            summarise(rounds)
        for line in table(by_cap, config):
            say(line)
        if arguments.plot:
            from tests.benchmarks.mixture_plot import draw

            draw([result_under(cap, rounds) for cap, rounds in by_cap.items()], arguments.plot)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if arguments.remove:
            shutil.rmtree(checkpoint)


def mixture_config(total_bytes: float) -> Qwen3MoeConfig:
    """Return the config of a mixture of about ``total_bytes`` in bfloat16."""
    fits = ((width, _layers(width, total_bytes)) for width in WIDTHS)
    width, layers = next((fit for fit in fits if fit[1] >= FEWEST_LAYERS), (WIDTHS[-1], 1))
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=width, moe_intermediate_size=width * 3 // 8, intermediate_size=width * 3,
        num_hidden_layers=layers, num_attention_heads=width // 64, num_key_value_heads=4, head_dim=128,
        num_experts=EXPERTS, num_experts_per_tok=CHOSEN, norm_topk_prob=True, tie_word_embeddings=False,
        max_position_embeddings=4096, bos_token_id=0, eos_token_id=None, dtype=torch.bfloat16,
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip


def _layers(width: int, total_bytes: float) -> int:
    """Return how many layers of ``width`` fit beside the embedding and the head."""
    attention = 2 * width * 2 * width + 2 * width * 512
    layer = 2 * (EXPERTS * 3 * width * width * 3 // 8 + attention + EXPERTS * width)
    return int((total_bytes - 2 * 2 * VOCABULARY * width) // layer)


def make_mixture(config: Qwen3MoeConfig, folder: Path) -> Path:
    """Write a checkpoint of ``config`` into ``folder`` unless one is there; return the folder."""
    if not (folder / INDEX).exists():
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
        write_shards(published_tensors(config), folder, torch.bfloat16)
    return folder


def published_tensors(config: Qwen3MoeConfig) -> Iterator[tuple[str, Sequence[int], float]]:
    """Yield name, shape and spread of each tensor as published checkpoints have them: an expert's three side by side.

    Tokens are spread widely, and what a layer adds to them little, by GPT-2's rule for what leads back to the residual.
    Else what attention adds, much the same from position to position, outweighs them: the model says one token for
    ever, and its experts are always kept.
    """
    back = SPREAD / math.sqrt(2 * config.num_hidden_layers)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    hidden, width = config.hidden_size, config.moe_intermediate_size
    matrices = {
        "down_proj": ((hidden, width), back),
        "gate_proj": ((width, hidden), SPREAD),
        "up_proj": ((width, hidden), SPREAD),
    }
    for name, parameter in model.named_parameters():
        module, _, stacked = name.rpartition(".")
        if not module.endswith(".experts"):
            yield name, parameter.shape, 1.0 if "embed" in name else back if "o_proj" in name else SPREAD
        elif stacked == "gate_up_proj":
            for expert in range(config.num_experts):
                yield from ((f"{module}.{expert}.{matrix}.weight", *given) for matrix, given in matrices.items())


def measure(config: Qwen3MoeConfig, checkpoint: Path, work: Path, arguments: argparse.Namespace) -> dict[str, Rounds]:
    """Return the rounds by cap; they are kept in a file as they come."""
    layers = _converted(checkpoint, work, arguments.airllm)
    bandwidth = partial(random_read_bandwidth, read_bytes=expert_bytes(config) // 3)
    by_cap: dict[str, Rounds] = {}
    for cap in arguments.caps:
        setting = Setting(checkpoint, work, parse_size(cap), arguments.tokens, arguments.timeout)
        sides = _sides(setting, arguments, layers)
        by_cap[cap] = []
        for number in range(arguments.rounds):
            say(f"cap {cap}")
            by_cap[cap].append(run_round(sides, checkpoint, number, work, bandwidth=bandwidth))
            keep(arguments.folder / f"results-mixture-{arguments.gigabytes:g}gb.json", arguments, by_cap)
    return by_cap


def _converted(checkpoint: Path, work: Path, python: str | None) -> Path | None:
    """Return the folder that AirLLM, run by ``python``, made of the checkpoint; null where it can't or isn't there."""
    if python is None:
        return None
    try:
        seconds = airllm.convert(checkpoint, work / "airllm", python)
    except SystemExit as failure:
        say(f"no AirLLM: {failure}")
        return None
    say(f"AirLLM converted the checkpoint in {seconds:.1f} s, once, outside the cap")
    return work / "airllm"


def _sides(setting: Setting, arguments: argparse.Namespace, layers: Path | None) -> Mapping[str, Callable[[], Side]]:
    """Return what runs each side under the cap of ``setting``."""
    own = [round(share * setting.cap) for share in BUDGET_SHARES]
    budgets = own if arguments.budgets is None else [parse_size(budget) for budget in arguments.budgets]
    sides: dict[str, Callable[[], Side]] = {OURS: partial(offstage_side, setting, arguments.option)}
    for budget in budgets:
        sides[f"accelerate {format_bytes(budget)}"] = partial(accelerate_side, setting, budget)
    if layers is not None:
        sides["AirLLM"] = partial(airllm_side, setting, layers, arguments.airllm)
    return sides


def expert_bytes(config: Qwen3MoeConfig) -> int:
    """Return the bytes of one expert: three matrices in bfloat16."""
    return 2 * 3 * int(config.hidden_size) * int(config.moe_intermediate_size)


@dataclass(frozen=True, slots=True)
class CapResult:
    """Medians under a ``cap`` in bytes: seconds and streamed bytes a token, and the ``hit_rate`` where one is told.

    ``others`` are the seconds a token of the other tools at their best. What has no figure is null.
    """

    cap: int
    seconds: float | None
    streamed: float | None
    hit_rate: float | None
    others: Mapping[str, float | None]


def result_under(cap: str, rounds: Rounds) -> CapResult:
    """Return what ``rounds`` under ``cap`` came to."""
    ours = [one["sides"][OURS] for one in rounds if one["sides"][OURS]["seconds"]]
    medians = {
        key: statistics.median(numbers)
        if (numbers := [side[key] for side in ours if side.get(key) is not None])
        else None
        for key in ("seconds", "streamed", "hit_rate")
    }
    return CapResult(parse_size(cap), **medians, others={tool: _best(rounds, tool) for tool in OTHERS})


def _best(rounds: Rounds, tool: str) -> float | None:
    """Return the seconds a token of ``tool`` with the budget that suits it best."""
    names = [name for name in rounds[0]["sides"] if name.startswith(tool)]
    lived = [[one["sides"][name]["seconds"] for one in rounds if one["sides"][name]["seconds"]] for name in names]
    return min((statistics.median(times) for times in lived if times), default=None)


def table(by_cap: Mapping[str, Rounds], config: Qwen3MoeConfig) -> Iterator[str]:
    """Yield the lines of the table."""
    routed = config.num_hidden_layers * CHOSEN * expert_bytes(config)
    sides = [side for rounds in by_cap.values() for one in rounds for side in one["sides"].values() if side["seconds"]]
    for tokens in {tuple(side["tokens"]) for side in sides}:
        yield f"{len(set(tokens))} of the {len(tokens)} tokens that were said are different ones"
    yield f"a token is routed to {format_bytes(routed)} in {config.num_hidden_layers} layers; medians:"
    yield RULER
    for cap, rounds in by_cap.items():
        yield f"{cap:8} {_row(result_under(cap, rounds), routed)}"


def _row(result: CapResult, routed: int) -> str:
    """Return the cells of the table's line for one cap."""
    if result.seconds is None or result.streamed is None:
        return "no figure"
    rate = "none" if result.hit_rate is None else f"{result.hit_rate:.1%}"
    least = routed * (1 - (result.hit_rate or 0.0))
    share = f"{result.streamed / least:.2f}" if least else "-"
    times = {tool: f"{seconds / result.seconds:.1f}x" if seconds else "-" for tool, seconds in result.others.items()}
    others = "".join(f"  {text:>{len(tool)}}" for tool, text in times.items())
    return f"{result.seconds:10.3f}  {format_bytes(round(result.streamed)):>16}  {rate:>8}  {share:>12}{others}"


if __name__ == "__main__":
    main()
