"""The sweeper that searches, where Hydra looks for it: see ``offstage_launchers`` beside this.

It imports no optuna, which only a search needs.
"""

from offstage.pipeline.sweeps import search


class OptunaSweeper(search.OptunaSearch):
    """A search with Optuna, under the name that ``hydra.sweeper`` gives."""
