"""The launchers of a sweep where Hydra looks for them: it takes plugins from the namespace ``hydra_plugins`` alone.

It imports every module there when it starts, in offstage and in every other program of the environment, so what
this one imports is little: no submitit, nothing of a run. The build puts this folder's ``hydra_plugins`` at the top.
"""

from offstage.pipeline.sweeps import launchers


class LocalLauncher(launchers.LocalJobLauncher):
    """Jobs on this machine, under the name that ``hydra.launcher`` gives."""


class SlurmLauncher(launchers.SlurmJobLauncher):
    """Jobs of a cluster, under the name that ``hydra.launcher`` gives."""


class InTurnLauncher(launchers.InTurnJobLauncher):
    """Jobs one after another, as Hydra's ``basic`` has them, under the name that ``hydra.launcher`` gives."""
