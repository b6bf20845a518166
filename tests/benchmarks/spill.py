"""What ``offload_state_dict`` saves while pickled shards are loaded: the peak of anonymous memory with and without it.

    python -m tests.benchmarks.spill 0.4b

Writes the checkpoint again as ``.bin`` shards, once as zips (which are memory-mapped) and once as pickles from before
zips (which must be loaded whole), loads each onto the host both ways in a fresh process, and prints the peak above what
the process held before, beside the sizes that it should be made of: the weights, and the largest shard.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.benchmarks.checkpoints import SHAPES, make
from tests.benchmarks.load import METER, say

LOAD = (
    METER
    + """
from offstage.stages.empty_init import init_empty_weights
from offstage.stages.shard_load import load_checkpoint_in_model
config = transformers.AutoConfig.from_pretrained(folder)
with init_empty_weights():
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype)
watcher.start()
began = time.perf_counter()
load_checkpoint_in_model(model, folder, {"": "cpu"}, folder + "/spill", offload_state_dict=sys.argv[2] == "spilled")
finish(model, seconds=time.perf_counter() - began)
"""
)


def main() -> None:
    """Run the four loads and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench"))
    arguments = parser.parse_args()
    source = make(arguments.size, arguments.folder / arguments.size)
    for kind in ("zip", "pickle"):
        folder = arguments.folder / f"{arguments.size}-{kind}"
        try:
            largest = pickled(source, folder, as_zip=kind == "zip")
            weights = sum(file.stat().st_size for file in folder.glob("*.bin"))
            say(f"{kind}: weights {weights / 1e9:.2f} GB, largest shard {largest / 1e9:.2f} GB")
            for way in ("direct", "spilled"):
                side = load(folder, way)
                say(f"{kind}  {way:7}  peak {side['peak'] / 1e9:.2f} GB  {side['seconds']:.2f} s")
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def pickled(source: Path, folder: Path, *, as_zip: bool) -> int:
    """Write ``source`` into ``folder`` as ``.bin`` shards; return the size of the largest."""
    folder.mkdir()
    shutil.copyfile(source / "config.json", folder / "config.json")
    weight_map, sizes = {}, []
    for shard in sorted(source.glob("*.safetensors")):
        file = folder / f"pytorch_{shard.stem}.bin"
        state = load_file(shard)
        torch.save(state, file, _use_new_zipfile_serialization=as_zip)
        weight_map.update(dict.fromkeys(state, file.name))
        sizes.append(file.stat().st_size)
    folder.joinpath("pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return max(sizes)


def load(folder: Path, way: str) -> dict[str, float]:
    """Load ``folder`` in a process of its own; what it printed."""
    command = [sys.executable, "-c", LOAD, str(folder), way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way} failed: {done.stderr.strip()[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
