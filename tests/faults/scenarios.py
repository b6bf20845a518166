"""What runs while the storage fails: five runs of the embedded model, of which each does other things to its files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

CHECKPOINT = "checkpoint"
OUTPUTS = "outputs"
_COMMON = (
    "device_map=sequential",
    "max_memory.cpu=2.8MB",
    "generate.prompts=[[5,6,7],waits]",
    "generate.max_new_tokens=4",
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run, as its arguments, and how much of the cache is there before it: all of it, or what these folders hold."""

    name: str
    arguments: Sequence[str]
    kept: Sequence[str] | None = ("hardware", "empty_init")
    pickled: bool = False


SCENARIOS = (
    Scenario("cached", ("storage.io=direct",), kept=None),
    Scenario("streams", ("storage.io=direct",)),
    Scenario("maps", ("storage.io=mmap",)),
    Scenario("stores", ("storage.io=direct", "dtype=float32", "verify=full")),
    Scenario("spills", ("storage.io=direct", "offload_state_dict=true"), pickled=True),
    Scenario("from nothing", ("storage.io=direct",), kept=()),
)
"""The cheapest first. What is kept spares the time of a rehearsal and of measuring the machine, but in the last one."""


class ScenarioFolder:
    """The folder of a scenario: a checkpoint, and outputs that can be brought back to how they were before the run."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario, self.folder = scenario, folder
        self._before = folder.with_name(f"{folder.name}.before")
        shutil.copytree(str(resources.files("offstage.conf") / "checkpoints" / "tiny"), folder / CHECKPOINT)
        if scenario.pickled:
            _pickle(folder / CHECKPOINT)

    @property
    def arguments(self) -> list[str]:
        """The command's arguments."""
        return [f"model.path={CHECKPOINT}", *_COMMON, *self.scenario.arguments]

    def keep(self) -> None:
        """Keep of the cache, as a first run left it, what is to be there before each."""
        cache = self.folder / OUTPUTS / "cache"
        kept = self.scenario.kept
        for each in cache.iterdir():
            if kept is not None and each.name not in kept and each.is_dir():
                shutil.rmtree(each)
        shutil.rmtree(self.folder / OUTPUTS / "runs")
        if kept == ():
            shutil.rmtree(self.folder / OUTPUTS)
        else:
            shutil.copytree(self.folder / OUTPUTS, self._before)

    def restore(self) -> None:
        """Bring the outputs back to how they were kept."""
        shutil.rmtree(self.folder / OUTPUTS, ignore_errors=True)
        if self._before.exists():
            shutil.copytree(self._before, self.folder / OUTPUTS)

    def records(self) -> list[dict[str, Any]]:
        """Return the records of the runs so far, oldest first."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob(f"{OUTPUTS}/runs/*/*/run.json"))]


def _pickle(folder: Path) -> None:
    """Turn the shards of ``folder`` into one file of the older format."""
    import torch
    from safetensors.torch import load_file

    shards = sorted(folder.glob("*.safetensors"))
    torch.save(
        {name: tensor for shard in shards for name, tensor in load_file(shard).items()}, folder / "pytorch_model.bin"
    )
    for path in (*shards, folder / "model.safetensors.index.json"):
        path.unlink()
