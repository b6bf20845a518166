"""Plans of very large models from their ``config.json`` alone, on eight described accelerators: seconds of each.

    python -m tests.benchmarks.planning
    python -m tests.benchmarks.planning Llama-405B DeepSeek-V3 --policy sequential

Seconds are those of the whole command, imports included: ``cold`` with nothing known of the machine or the model (an
empty cache of the run and of the user), ``budget`` with another budget, where the model is known, and ``again`` with
the same. ``cpu`` is the processor time of the cold one, which what else the machine does changes less.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.conftest import COMMAND

_LLAMA: Mapping[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "OPT-13B": {
        "model_type": "opt", "architectures": ["OPTForCausalLM"], "hidden_size": 5120, "ffn_dim": 20480,
        "num_hidden_layers": 40, "num_attention_heads": 40, "word_embed_proj_dim": 5120, "vocab_size": 50272,
        "dtype": "float16",
    },
    "Llama-70B": {
        **_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "Llama-405B": {
        **_LLAMA, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
    "Mixtral-8x22B": {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 6144,
        "intermediate_size": 16384, "num_hidden_layers": 56, "num_attention_heads": 48, "num_key_value_heads": 8,
        "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000, "max_position_embeddings": 65536,
        "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "dtype": "bfloat16",
    },
    "DeepSeek-V3": json.loads(Path(__file__).parents[1].joinpath("e2e/configs/deepseek-v3.json").read_text()),
}  # fmt: skip
OTHER_BUDGET = "max_memory.cpu=50GB"


@dataclass(frozen=True, slots=True)
class PlanningTimes:
    """The seconds of three commands, and the processor time of the first; see the module."""

    cold: float
    cpu: float
    budget: float
    again: float


def measure(name: str, folder: Path, options: Sequence[str] = ()) -> PlanningTimes:
    """Return how long planning takes for the model ``name`` on ``hardware=8x80gb``, in the new ``folder``."""
    checkpoint = folder / name
    checkpoint.mkdir(parents=True)
    checkpoint.joinpath("config.json").write_text(json.dumps(CONFIGS[name]))
    asked = ["stages=plan_only", "hardware=8x80gb", "model=pretrained", f"model.path='{checkpoint}'", *options]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    cold = _seconds(asked, folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return PlanningTimes(cold, cpu, _seconds([*asked, OTHER_BUDGET], folder), _seconds(asked, folder))


def _seconds(asked: Sequence[str], folder: Path) -> float:
    began = time.perf_counter()
    done = subprocess.run(
        [*COMMAND, *asked], cwd=folder, env={**os.environ, "XDG_CACHE_HOME": str(folder / "user")}, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    return time.perf_counter() - began


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MODEL", help=f"of {', '.join(CONFIGS)}; all by default")
    parser.add_argument("--policy", help="the device_map; the config's own by default")
    given = parser.parse_args()
    options = [f"device_map={given.policy}"] if given.policy else []
    sys.stdout.write(f"{'':14}{'cold':>8}{'cpu':>8}{'budget':>8}{'again':>8}\n")
    for name in given.names or CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            measured = measure(name, Path(folder), options)
        sys.stdout.write(
            f"{name:14}{measured.cold:8.2f}{measured.cpu:8.2f}{measured.budget:8.2f}{measured.again:8.2f}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
