"""Plans of large Llamas from their configs alone on simulated machines: the bytes of each link, the seconds of a token.

    python -m tests.benchmarks.link_plans

Where the host holds what is streamed, links bind; where it doesn't, storage. Where a model fits, nothing is streamed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.init import init_empty_weights
from offstage.stages.machine.rates import Rates
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.policies.optimal import Search
from offstage.stages.plan.traffic import Step, forecast
from tests.stages.plan.plans import make_plan, of

SHAPES: Mapping[str, Mapping[str, int]] = {
    "13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
            "vocab_size": 32000},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "vocab_size": 128256},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
             "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
MACHINES = ("2x24gb", "4x24gb", "8x80gb")
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "as it is": {},
    "host of 1TB": {"host": "1TB"},
    "6GB of each": {"host": "1TB", "each": "6GB"},
}
"""The ``host``'s memory, and the weights that ``each`` accelerator may hold."""


def outline_of(name: str, folder: Path) -> Outline:
    """Return the outline of the Llama ``name`` in bfloat16, whose config is written into ``folder``."""
    shape = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **SHAPES[name]}
    folder.mkdir()
    folder.joinpath("config.json").write_text(json.dumps(shape))
    with init_empty_weights():
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype="bfloat16")
    return Outline(describe(model, no_split=model._no_split_modules, rehearsed=False))


def plan_of(outline: Outline, folder: Path, machine: str, *, host: str = "", each: str = "") -> Plan:
    """Return the plan of ``outline`` on ``machine``, for the config in ``folder`` and a prompt of a few words."""
    described: Any = OmegaConf.to_container(OmegaConf.load(Path("conf", "hardware", f"{machine}.yaml")))
    described |= {"host": {"memory": host}} if host else {}
    given = {**{str(index): each for index in range(int(machine[0]))}, "cpu": "950GB"} if each else {}
    request = {"prompts": ["Once upon a time"], "max_new_tokens": 64}
    config = {"model": {"path": str(folder)}, "hardware": described, "max_memory": given, "generate": request}
    return make_plan(outline, {**config, "device_map": "optimal", "storage": {"io": "direct"}})


def seconds_over_one_link(outline: Outline, plan: Plan) -> float:
    """Return the predicted seconds of a token where one accelerator alone streams, in the budgets of ``plan``."""
    rates = Rates(**plan.rates)
    placement = Search(rates, links=1).optimal(outline, plan.budgets)
    return forecast(lay_out(outline, placement, plan.budgets), Step(), rates).seconds


def rows() -> Iterator[tuple[str, str, str, float, Plan]]:
    """Yield the model, machine and setting of each plan, the seconds of a token over one link, and the plan."""
    with tempfile.TemporaryDirectory() as work:
        for name in SHAPES:
            folder = Path(work, name)
            outline = outline_of(name, folder)
            for setting, options in SETTINGS.items():
                for machine in MACHINES:
                    plan = plan_of(outline, folder, machine, **options)
                    yield name, machine, setting, seconds_over_one_link(outline, plan), plan


def main() -> None:
    """Print the table: seconds a token over one link and over all, what bounds it, gigabytes in all and by link."""
    for name, machine, setting, before, plan in rows():
        links = " ".join(f"{count / 1e9:.1f}" for count in of(plan, "transfer_bytes").values())
        seconds, bound = plan.forecast["seconds_per_token"], plan.forecast["bottleneck"]
        sys.stdout.write(
            f"{name:5} {machine:7} {setting:12} {before:7.3f} s  {seconds:7.3f} s  {bound:13} "
            f"{int(plan.forecast['streamed_bytes_per_token']) / 1e9:6.1f} GB: {links}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
