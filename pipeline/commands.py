"""The commands' front doors.

A command takes a tenth of a second to import what it is made of. Before that, here, signals are heeded and the process
is made one in which the rest can rely on its streams, its arguments and its current folder.
"""

from __future__ import annotations

import gc
from functools import partial
from importlib import import_module

from offstage.pipeline.command_exit import exit_at_signals
from offstage.pipeline.garbage import uncollected
from offstage.pipeline.process_setup import set_up

_FRAME_SLOTS = 2**15
"""How many values the frame of a command's door has room for, which uses a dozen.

CPython (3.11 and later) keeps frames in pieces of 16 kB, and maps and unmaps a piece at each call that goes over the
end of the last: 6 µs, two hundred times what a call takes, for every call of a loop that happens to run at such a
depth. A piece is as large as its first frame needs, to a power of two: with this one it is 512 kB, half of which is
left to all calls below, a thousand deep. No page of it is touched that isn't used.
"""


def _enter(name: str, module: str) -> None:
    exit_at_signals(name)
    set_up(name)
    with uncollected():
        found = import_module(module)
    try:
        found.main()
    finally:
        gc.freeze()  # all of it ends now: to look for cycles in what torch and transformers are takes most of a second


_enter.__code__ = _enter.__code__.replace(co_stacksize=_FRAME_SLOTS)

offstage = partial(_enter, "offstage", "offstage.pipeline.app")
cache = partial(_enter, "offstage-cache", "offstage.pipeline.cache.command")
init = partial(_enter, "offstage-init", "offstage.pipeline.init_command")
replay = partial(_enter, "offstage-replay", "offstage.pipeline.replay_command")
report = partial(_enter, "offstage-report", "offstage.pipeline.report.command")
sweep = partial(_enter, "offstage-sweep", "offstage.pipeline.sweeps.command")
job = partial(_enter, "offstage", "offstage.pipeline.job")
"""One job in this process, which another waits for."""
queued_job = partial(_enter, "offstage", "offstage.pipeline.sweeps.job_run")
"""One job of a sweep, which a queue starts."""
tracker = partial(_enter, "offstage", "offstage.pipeline.tracking.store_process")
"""One request to a tracker's store, in this process, which another waits for."""
