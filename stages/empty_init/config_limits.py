"""The numbers of a ``config.json``, held against what no model has.

A config of a billion layers is well-formed: transformers would build them one by one until memory ends. The limits are
many times those of any model that there is. What they let pass is bounded as the model is built
(``offstage.stages.checkpoints.bounds``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offstage.pipeline.errors import CheckpointError
from offstage.pipeline.plain_data import walk

_LIMITS: tuple[tuple[re.Pattern[str], float], ...] = (
    (re.compile(r"(^|_)(layers?|depths?|blocks)$"), 2048),
    (re.compile(r"vocab|position"), 2**31),
    (re.compile(r"max|window|chunk|cache|context|buffer|batch|block"), math.inf),
    (
        re.compile(r"(^|_)(size|sizes|dims?|embd|inner|width|heads?|experts|ffn?|kv|model|rank|channels|state)$"),
        2**20,
    ),
)
"""The most that a number may be whose key matches; the first pattern that does counts."""


def check_numbers(path: Path, config: Mapping[str, Any]) -> None:
    """Raise a ``CheckpointError`` where a number of ``config``, which ``path`` holds, is beyond what models have."""
    for place, value in walk(config):
        key = place.rpartition(".")[2].partition("[")[0]
        most = next((limit for pattern, limit in _LIMITS if pattern.search(key)), None)
        if most is not None and isinstance(value, int | float) and not isinstance(value, bool) and value > most:
            raise CheckpointError(
                f"{path}: {key}: {value} is more than any model has (at most {most}); restore the file"
            )
