"""The sweepers where Hydra looks for them: it takes plugins from the namespace ``hydra_plugins`` alone.

It imports every module there when it starts, in offstage and in every other program of the environment, so what
this one imports is little: no submitit, no optuna, nothing of a run. The build puts this folder's ``hydra_plugins`` at
the top.
"""

from offstage.pipeline.sweeps import search, sweeper


class GridSweeper(sweeper.GridOfJobs):
    """Every combination of the values that are given, under the name that ``hydra.sweeper`` gives."""


class OptunaSweeper(search.OptunaSearch):
    """A search with Optuna, under the name that ``hydra.sweeper`` gives."""
