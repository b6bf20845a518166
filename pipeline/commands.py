"""The commands' front doors.

A command takes a tenth of a second to import what it is made of. Before that, here, signals are heeded and the process
is made one in which the rest can rely on its streams, its arguments and its current folder.
"""

from __future__ import annotations

import gc
from functools import partial
from importlib import import_module

from offstage.pipeline.command_exit import exit_at_signals
from offstage.pipeline.interpreter import uncollected, with_frame_room
from offstage.pipeline.process_setup import is_one_of_several, set_up


@with_frame_room
def _enter(name: str, module: str, *, is_run: bool = False) -> None:
    exit_at_signals(name, keeps_first=is_run and is_one_of_several())
    set_up(name)
    with uncollected():
        imported = import_module(module)
    try:
        imported.main()
    finally:
        gc.freeze()  # all of it ends now: to look for cycles in what torch and transformers are takes most of a second


offstage = partial(_enter, "offstage", "offstage.pipeline.app", is_run=True)
cache = partial(_enter, "offstage-cache", "offstage.pipeline.cache.command")
init = partial(_enter, "offstage-init", "offstage.pipeline.init_command")
replay = partial(_enter, "offstage-replay", "offstage.pipeline.replay_command", is_run=True)
report = partial(_enter, "offstage-report", "offstage.pipeline.report.command")
sweep = partial(_enter, "offstage-sweep", "offstage.pipeline.sweeps.command")
job = partial(_enter, "offstage", "offstage.pipeline.job", is_run=True)
"""One job in this process, which another waits for."""
queued_job = partial(_enter, "offstage", "offstage.pipeline.sweeps.job_run", is_run=True)
"""One job of a sweep, which a queue starts."""
tracker = partial(_enter, "offstage", "offstage.pipeline.tracking.store_process")
"""One request to a tracker's store, in this process, which another waits for."""
