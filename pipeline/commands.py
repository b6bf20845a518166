"""The commands' front doors.

A command takes a tenth of a second to import what it is made of. Before that, here, signals are heeded and the process
is made one in which the rest can rely on its streams, its arguments and its current folder.
"""

from __future__ import annotations

from importlib import import_module

from pipeline.command_exit import exit_at_signals
from pipeline.process_setup import set_up


def offstage() -> None:
    """Run the command ``offstage``."""
    _enter("offstage", "pipeline.app")


def cache() -> None:
    """Run the command ``offstage-cache``."""
    _enter("offstage-cache", "pipeline.cache.command")


def replay() -> None:
    """Run the command ``offstage-replay``."""
    _enter("offstage-replay", "pipeline.replay_command")


def report() -> None:
    """Run the command ``offstage-report``."""
    _enter("offstage-report", "pipeline.report.command")


def job() -> None:
    """Run one job in this process, which another waits for."""
    _enter("offstage", "pipeline.job")


def _enter(name: str, module: str) -> None:
    exit_at_signals(name)
    set_up(name)
    import_module(module).main()
