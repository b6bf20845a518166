"""The keys of sweeps: who decides on the jobs (``hydra/sweeper``), and where they run (``hydra/launcher``).

The names are those that users of Hydra, hydra-submitit-launcher and hydra-optuna-sweeper know. In this command alone
they mean what stands here: what another program of the environment has under them it keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional  # noqa: UP035 - OmegaConf knows only these

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import MISSING, OmegaConf

from offstage.pipeline.errors import ConfigError

HERE, SLURM = "offstage.here", "offstage.slurm"
"""What ``hydra.launcher._target_`` says: no class, since nothing but a sweep's own loop starts its jobs."""

SAMPLERS: dict[str, dict[str, Any]] = {
    "gp": {"_target_": "optuna.samplers.GPSampler", "seed": 0, "n_startup_trials": 3},
    "tpe": {"_target_": "optuna.samplers.TPESampler", "seed": 0, "n_startup_trials": 5},
    "random": {"_target_": "optuna.samplers.RandomSampler", "seed": 0},
}
"""What proposes, by the name that ``hydra/sweeper/sampler`` gives. A Gaussian process needs the fewest jobs; a search
that is resumed has the same seed, and so the same jobs. Other keys of these classes are given with a ``+``."""


@dataclass
class HereKeys:
    """So many jobs, ``n_jobs``, are at work at a time on this machine. Null: one; of plans alone one a core."""

    _target_: str = HERE
    n_jobs: Optional[int] = None  # noqa: UP045


@dataclass
class SlurmKeys:
    """What a job asks of the queue, by submitit's names, of which others may be given too; submitit knows them.

    A job is ended after ``timeout_min``; one that ran out of time is queued again ``max_num_timeout`` times.
    ``additional_parameters`` are options of sbatch that have no name there.
    """

    _target_: str = SLURM
    submitit_folder: str = "${hydra.sweep.dir}/.submitit/%j"
    name: str = "${hydra.job.name}"
    timeout_min: int = 60
    nodes: int = 1
    tasks_per_node: int = 1
    max_num_timeout: int = 0
    additional_parameters: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006


@dataclass
class GridKeys:
    """``params`` has what is swept over, as the command line has it; a queue gets ``max_batch_size`` jobs at a time.

    Null: all of them.
    """

    _target_: str = "hydra_plugins.offstage_sweepers.GridSweeper"
    max_batch_size: Optional[int] = None  # noqa: UP045
    params: Dict[str, str] = field(default_factory=dict)  # noqa: UP006


@dataclass
class SearchKeys:
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


def register_sweeps() -> None:
    """Have the names of sweepers and launchers mean this command's; again it changes nothing."""
    Plugins.instance()  # looking for plugins is what stores the configs of others: from here on, these stand
    store = ConfigStore.instance()
    for name, keys in (("basic", GridKeys), ("optuna", SearchKeys)):
        node = OmegaConf.structured(keys)
        OmegaConf.set_struct(node.params, False)  # a dotted override may add a key to be swept over
        store.store(group="hydra/sweeper", name=name, node=node, provider="offstage")
    for name, sampler in SAMPLERS.items():
        store.store(group="hydra/sweeper/sampler", name=name, node=sampler, provider="offstage")
    here = ("basic", "local", "submitit_local")
    for name, launcher in (*((name, HereKeys) for name in here), ("submitit_slurm", SlurmKeys)):
        node = OmegaConf.structured(launcher)
        OmegaConf.set_struct(node, False)  # whose keys the others are says ``refuse_launcher``, or submitit
        store.store(group="hydra/launcher", name=name, node=node, provider="offstage")


def refuse_launcher(keys: Any) -> None:
    """Raise a ``ConfigError`` where ``keys``, those of ``hydra.launcher``, name what can't run a sweep here.

    Others (joblib's, ray's) start jobs in processes of their own that don't know this command, and forget what each
    came to: a sweep would end well whatever became of its jobs.
    """
    target = keys._target_
    if target not in (HERE, SLURM):
        raise ConfigError(
            f"hydra/launcher: {target!r} forgets what the jobs of a sweep came to; give local, submitit_local or"
            " submitit_slurm"
        )
    if target == SLURM:
        return
    if keys.n_jobs is not None and keys.n_jobs < 1:
        raise ConfigError(f"hydra.launcher.n_jobs: {keys.n_jobs} is no number of jobs; give 1 or more, or null")
    own = {"_target_", "n_jobs"}
    given = {name: value for name, value in keys.items() if name not in own and value is not None}
    if given:
        raise ConfigError(
            "\n".join(
                f"hydra.launcher.{name}: {value!r} is for a queue, and jobs on this machine have none; leave it out, "
                "or give hydra/launcher=submitit_slurm"
                for name, value in given.items()
            )
        )
