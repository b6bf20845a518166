"""The keys of the sweepers: Hydra's own, and a search by the names that users of hydra-optuna-sweeper know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List  # noqa: UP035 - OmegaConf knows only these

from hydra._internal.core_plugins.basic_sweeper import BasicSweeperConf
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

SAMPLERS: dict[str, dict[str, Any]] = {
    "gp": {"_target_": "optuna.samplers.GPSampler", "seed": 0, "n_startup_trials": 3},
    "tpe": {"_target_": "optuna.samplers.TPESampler", "seed": 0, "n_startup_trials": 5},
    "random": {"_target_": "optuna.samplers.RandomSampler", "seed": 0},
}
"""What proposes, by the name that ``hydra/sweeper/sampler`` gives. A Gaussian process needs the fewest jobs; a search
that is resumed has the same seed, and so the same jobs. Other keys of these classes are given with a ``+``."""


@dataclass
class SearchConfig:
    """``params`` has what is searched, as the command line has it: ``interval(1,10)``, ``range(1,10,2)``, values.

    Of ``n_trials`` proposals ``n_jobs`` are made, and run, at a time; what was proposed before is no job again.
    ``direction`` is minimize or maximize.
    """

    defaults: List[Any] = field(default_factory=lambda: [{"sampler": "gp"}])  # noqa: UP006
    _target_: str = "hydra_plugins.offstage_sweepers.OptunaSweeper"
    _recursive_: bool = False  # the sampler is made when the search begins: only then is optuna there, or not
    sampler: Any = MISSING
    direction: str = "minimize"
    n_trials: int = 20
    n_jobs: int = 1
    params: Dict[str, str] = field(default_factory=dict)  # noqa: UP006


def register_sweepers() -> None:
    """Have ``hydra/sweeper=optuna`` name this command's search, also where a plugin of that name is installed.

    Hydra's own sweeper, ``basic``, goes by the launcher: jobs run one at a time on this machine.
    """
    at_a_time: Any = "${offstage.batch:${hydra.launcher._target_}}"
    store = ConfigStore.instance()
    for name, keys in (("basic", BasicSweeperConf(max_batch_size=at_a_time, params={})), ("optuna", SearchConfig())):
        node = OmegaConf.structured(keys)
        OmegaConf.set_struct(node.params, False)  # a dotted override may add a key to be swept over
        store.store(group="hydra/sweeper", name=name, node=node, provider="offstage")
    for name, sampler in SAMPLERS.items():
        store.store(group="hydra/sweeper/sampler", name=name, node=sampler, provider="offstage")
