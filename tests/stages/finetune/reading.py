"""The threads that read and write what is offloaded."""

import threading

from stages.dispatch.transfer.carrier import reader_pool
from stages.machine.probes import READING_THREADS


def let_threads_end() -> None:
    """Return once all that the threads were asked for is done."""
    all_idle = threading.Barrier(READING_THREADS + 1)
    idle = [reader_pool().submit(all_idle.wait) for _ in range(READING_THREADS)]
    all_idle.wait()
    for one in idle:
        one.result()
