"""The threads that read, and write what is offloaded."""

import threading

from offstage.stages.dispatch.transfer.reading_threads import reader_pool
from offstage.stages.machine.probes import READING_THREADS


def settle() -> None:
    """Return once all that the threads were asked for has ended."""
    all_idle = threading.Barrier(READING_THREADS)
    for job in [reader_pool().submit(all_idle.wait) for _ in range(READING_THREADS)]:
        job.result()
