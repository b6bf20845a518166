"""Plans of very large models from their configs alone, on eight simulated accelerators: seconds and memory of each.

    python -m tests.benchmarks.plans

Each plan is made in a process of its own, with an empty cache: skeleton, rehearsal, plan and picture. Its seconds are
those after the imports; its memory is the peak of the whole process, what torch and transformers take included.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "OPT-13B": {
        "model_type": "opt", "architectures": ["OPTForCausalLM"], "hidden_size": 5120, "ffn_dim": 20480,
        "num_hidden_layers": 40, "num_attention_heads": 40, "word_embed_proj_dim": 5120, "vocab_size": 50272,
        "dtype": "float16",
    },
    "BLOOM-176B": {
        "model_type": "bloom", "architectures": ["BloomForCausalLM"], "hidden_size": 14336, "n_layer": 70,
        "n_head": 112, "vocab_size": 250880, "dtype": "bfloat16",
    },
    "Llama-405B": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16384,
        "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8,
        "vocab_size": 128256, "dtype": "bfloat16",
    },
    "64 experts": {
        "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 1024,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
        "vocab_size": 50304, "dtype": "bfloat16",
    },
}  # fmt: skip

CODE = """
import json, resource, sys, time
import torch, transformers
from offstage.pipeline.app import main
from offstage.stages.empty_init import describe, model
from offstage.stages.plan import stage
getattr(transformers, sys.argv.pop(1))
began = time.perf_counter()
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": time.perf_counter() - began, "bytes": peak}))
"""


def measure(name: str, folder: Path, policy: str = "optimal") -> dict[str, float]:
    """Return the ``seconds`` and the peak ``bytes`` of planning for the model ``name`` on ``hardware=8x80gb``."""
    checkpoint = folder / name
    checkpoint.mkdir(parents=True)
    checkpoint.joinpath("config.json").write_text(json.dumps(CONFIGS[name]))
    options = ["hardware=8x80gb", "stages=plan_only", "model=pretrained", f"model.path='{checkpoint}'"]
    command = [sys.executable, "-P", "-c", CODE, CONFIGS[name]["architectures"][0], *options, "max_memory=null"]
    done = subprocess.run([*command, f"device_map={policy}"], cwd=checkpoint, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print the table."""
    for policy in ("optimal", "sequential", "balanced"):
        with tempfile.TemporaryDirectory() as folder:
            for name in CONFIGS:
                found = measure(name, Path(folder), policy)
                sys.stdout.write(
                    f"{name:12} {policy:12} {found['seconds']:5.2f} s  {found['bytes'] / 2**20:5.0f} MiB\n"
                )
                sys.stdout.flush()


if __name__ == "__main__":
    main()
