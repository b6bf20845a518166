"""The pipeline without its command: for tests that need the live model of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offstage.pipeline.runner import check_config
from offstage.pipeline.stage_chain import StageChain

STAGES = ["empty_init", "plan", "shard_load", "dispatch"]


def config_for(checkpoint: Path, outputs: Path, **changes: Any) -> dict[str, Any]:
    """Return a whole resolved config for ``checkpoint``, with ``changes`` to its root keys."""
    model = {"kind": "pretrained", "path": str(checkpoint), "class": None, "tokenizer": None}
    return {
        "model": {**model, "revision": None, "no_split": None, "trust_remote_code": False, "allow_links": False},
        "dtype": "auto", "max_memory": {}, "device_map": "sequential", "device_map_overrides": {},
        "offload_folder": None, "offload_state_dict": False, "strict": True, "check_finite": False,
        "verify": "headers", "hardware": {"devices": None},
        "storage": {"io": "auto"}, "trace": False,
        "generate": {"prompts": [[1]], "max_new_tokens": 1}, "stages": STAGES, "stop_after": None, "seed": 0,
        "outputs": str(outputs), **changes,
    }  # fmt: skip


def dispatched_model(checkpoint: Path, outputs: Path, **changes: Any) -> Any:
    """Run the pipeline up to dispatch and return its model, ready to call."""
    return dispatched(checkpoint, outputs, **changes).model


def dispatched(checkpoint: Path, outputs: Path, **changes: Any) -> Any:
    """Run the pipeline up to dispatch and return what that stage's live half is."""
    config = config_for(checkpoint, outputs, **changes)
    chain = StageChain(check_config(config), config, cache=outputs / "cache")
    for name in chain.stages:
        chain.obtain(name)
    return chain.live("dispatch")
